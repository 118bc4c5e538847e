"""Every party, killed and stopped, before, during and after the read."""

from __future__ import annotations

import pytest

from tests.support.faults.fault_world import World
from tests.support.faults.playing import play
from tests.support.faults.scenario import Scenario
from tests.support.faults.scenarios import PROCESSES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", PROCESSES, ids=[scenario.name for scenario in PROCESSES])
def test_fault_of_a_process(world: World, scenario: Scenario) -> None:
    play(world, scenario)
