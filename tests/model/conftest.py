"""Numbers of examples of the state machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.examples import SAME, examples

EXAMPLES = examples(170)

MODEL = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    derandomize=SAME,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)

ROUTED = settings(MODEL, max_examples=max(1, EXAMPLES // 8))

MISROUTED = settings(MODEL, max_examples=max(1, EXAMPLES // 6))

OPERATED = settings(MODEL, max_examples=max(1, EXAMPLES // 5))

LYING = settings(MODEL, max_examples=max(1, EXAMPLES // 3))
"""Fewer, since an example with a liar has more calls."""

CAUGHT = settings(MODEL, max_examples=500, phases=[Phase.generate], derandomize=True)
"""For a sabotage: a violation need not be shrunk. Most are found within ten examples or so. A sabotage that is missed
needs a rule that leads to it, not a longer search."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leases end late in their thousands here: the home's log of them would hide how a rule was broken."""
    logger = logging.getLogger("kvferry_server.events")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
