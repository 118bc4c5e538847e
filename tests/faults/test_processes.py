"""Every party, killed and stopped, before, during and after the read; whole machines, paused."""

from __future__ import annotations

import pytest

from tests.support.faults.fault_world import World
from tests.support.faults.playing import play
from tests.support.faults.scenario import Scenario
from tests.support.faults.scenarios import MACHINES, PROCESSES, WITHOUT_A_LEASE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", PROCESSES, ids=[scenario.name for scenario in PROCESSES])
def test_fault_of_a_process(world: World, scenario: Scenario) -> None:
    play(world, scenario)


@pytest.mark.parametrize("scenario", MACHINES, ids=[scenario.name for scenario in MACHINES])
def test_pause_of_a_machine(world: World, scenario: Scenario) -> None:
    play(world, scenario)


@pytest.mark.parametrize("scenario", WITHOUT_A_LEASE, ids=[scenario.name for scenario in WITHOUT_A_LEASE])
def test_fault_of_a_process_beside_a_read_without_a_lease(optimistic_world: World, scenario: Scenario) -> None:
    play(optimistic_world, scenario)
