"""Transfers of all of a source's memory, and how they have to end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry._clock import now
from kvferry._transport.transport import Transfer, TransferState, Transport
from kvferry.errors import TransferFailed
from tests.transport.sources import SOON, Memory, Source, raw_part

TCP = "tcp"
"""For faults that need a post to return before it is done: CMA copies inside it, and needs no running source."""


class Clock:
    """A transport's clock, which a test moves on: so a time is over exactly when the test moves the clock past it."""

    def __init__(self) -> None:
        self.later = 0.0

    def __call__(self) -> float:
        return now() + self.later


def until(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds. Returns whether it does."""
    end = now() + SOON
    while not condition() and now() < end:
        threading.Event().wait(0.001)
    return condition()


def read_all(
    read: Transport, source: Source, memory: Memory, *, at: int = 0, deadline: float | None = SOON
) -> Transfer:
    part = raw_part(source.info, [memory.all_of(source, at=at)])
    return read.start([part], deadline=None if deadline is None else now() + deadline, label=source.name)


def assert_done(transfer: Transfer) -> None:
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE, transfer.error
    assert transfer.quiet


def assert_failed(transfer: Transfer) -> None:
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.error, TransferFailed)
    assert transfer.wait_quiet(SOON)
    assert transfer.error.quiet
