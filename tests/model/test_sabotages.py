"""The model check catches mistakes: each mistake that the protocol is written against breaks a rule."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.model.clocks import Violation
from tests.model.conftest import CAUGHT
from tests.model.lying import LyingMachine
from tests.model.machine import Machine
from tests.model.misrouted import MisroutedMachine
from tests.model.operated import OperatedMachine
from tests.model.prompt_sabotages import OF_A_CONFUSED_ROUTER
from tests.model.routed import RoutedLyingMachine, RoutedMachine
from tests.model.sabotages import OF_A_LIAR, OF_A_LIAR_AND_A_ROUTER, OF_A_ROUTER, OF_AN_OPERATOR, SABOTAGES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SABOTAGES[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(Machine, settings=CAUGHT)


@pytest.mark.parametrize("name", OF_A_LIAR)
def test_a_liar_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_A_LIAR[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(LyingMachine, settings=CAUGHT)


@pytest.mark.parametrize("name", OF_A_ROUTER)
def test_a_router_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_A_ROUTER[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(RoutedMachine, settings=CAUGHT)


@pytest.mark.parametrize("name", OF_A_LIAR_AND_A_ROUTER)
def test_a_liar_is_caught_beside_a_router(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_A_LIAR_AND_A_ROUTER[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(RoutedLyingMachine, settings=CAUGHT)


@pytest.mark.parametrize("name", OF_AN_OPERATOR)
def test_an_operator_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_AN_OPERATOR[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(OperatedMachine, settings=CAUGHT)


@pytest.mark.parametrize("name", OF_A_CONFUSED_ROUTER)
def test_a_confused_router_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_A_CONFUSED_ROUTER[name](monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(MisroutedMachine, settings=CAUGHT)
