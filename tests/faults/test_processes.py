"""Every party, killed and stopped, before, during and after the read."""

from __future__ import annotations

import pytest

from tests.faults.playing import play
from tests.faults.scenario import Scenario
from tests.faults.scenarios import PROCESSES
from tests.faults.world import World


@pytest.mark.parametrize("scenario", PROCESSES, ids=[scenario.name for scenario in PROCESSES])
def test_fault_of_a_process(world: World, scenario: Scenario) -> None:
    play(world, scenario)
