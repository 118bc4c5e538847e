"""R1 to R3 on the shipped lessor, home, publications and reader's lease, whatever is lost, repeated, delayed or
restarted; and R13, whatever a liar sends."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.model.conftest import EXAMPLES, LYING, MISROUTED, MODEL, OPERATED, ROUTED
from tests.model.lying import LyingMachine
from tests.model.machine import Machine
from tests.model.misrouted import MisroutedMachine
from tests.model.operated import OperatedMachine
from tests.model.routed import RoutedLyingMachine, RoutedMachine

pytestmark = [pytest.mark.property, pytest.mark.timeout(300 + EXAMPLES)]


def test_rules_hold() -> None:
    run_state_machine_as_test(Machine, settings=MODEL)


def test_rules_hold_beside_a_liar() -> None:
    run_state_machine_as_test(LyingMachine, settings=LYING)


def test_rules_hold_whatever_an_operator_does() -> None:
    run_state_machine_as_test(OperatedMachine, settings=OPERATED)


def test_rules_hold_for_references_that_a_router_makes() -> None:
    run_state_machine_as_test(RoutedMachine, settings=ROUTED)


def test_rules_hold_for_references_that_a_router_makes_beside_a_liar() -> None:
    run_state_machine_as_test(RoutedLyingMachine, settings=ROUTED)


def test_reads_of_another_prompt_never_count_whatever_a_router_confuses() -> None:
    run_state_machine_as_test(MisroutedMachine, settings=MISROUTED)
