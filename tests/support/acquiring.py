"""An acquisition that a test waits for."""

from __future__ import annotations

import queue
from collections.abc import Callable

from kvferry._control.acquirer import Acquirer
from kvferry._control.acquisition import Acquired, AcquireRequest, Told
from kvferry._control.cancellation import Cancellation
from kvferry.errors import KvferryError


def acquired(
    acquirer: Acquirer,
    request: AcquireRequest,
    cancellation: Cancellation,
    extended: Callable[[float], None] = lambda _: None,
) -> Acquired:
    """What comes of an acquisition; raises its error."""
    outcomes: queue.SimpleQueue[Told] = queue.SimpleQueue()
    acquirer.start(request, cancellation, extended, outcomes.put)
    outcome = outcomes.get(timeout=120)
    if isinstance(outcome, KvferryError):
        raise outcome
    assert isinstance(outcome, Acquired)
    return outcome
