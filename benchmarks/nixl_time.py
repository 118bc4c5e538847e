"""How long kvferry's reading threads are inside NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry._transport.nixl_agent import HandleState, ReadHandle


class NixlTime:
    """Attributes:
    seconds: in posts and checks of all reading threads so far, added up.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def counted(self, call: Callable[[ReadHandle], HandleState]) -> Callable[[ReadHandle], HandleState]:
        """The call, counted. For one reading thread: two that add at once could lose a sum."""

        def timed(handle: ReadHandle) -> HandleState:
            began = time.perf_counter()
            try:
                return call(handle)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def nixl_time() -> Iterator[NixlTime]:
    """Count posts and checks, until the end of the block."""
    counter, post, check = NixlTime(), ReadHandle.post, ReadHandle.check
    timed: Any = ReadHandle
    timed.post, timed.check = counter.counted(post), counter.counted(check)
    try:
        yield counter
    finally:
        timed.post, timed.check = post, check
