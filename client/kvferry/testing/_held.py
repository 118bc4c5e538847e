"""Reads that wait until a test lets them go on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry import _arguments as arguments
from kvferry.errors import InvalidField

Rows: TypeAlias = npt.NDArray[np.uint64]


@dataclass(eq=False)
class PostedRead:
    """A read that was posted, or is about to be. Only its agent keeps it: a read whose agent has ended never arrives.

    Attributes:
        peer: the agent that is read from.
        source, destination, length: ``uint64[n]``.
        connects: the first read from a peer: a few bytes, read in order to connect.
        let_go: whether the bytes may move; changed by `HeldReads`.
        done: whether they have.
    """

    peer: str
    source: Rows
    destination: Rows
    length: Rows
    connects: bool
    let_go: bool = False
    done: bool = False


class HeldReads:
    """Reads that are held back: posted, with their bytes still to come. Made by `Fabric.hold_reads`.

    They are counted in chunks, as they are posted to NIXL: one for each source rank that a rank reads from, or more
    where a read is larger than `NixlOptions.chunk_bytes`. Leaving the ``with`` block lets all of them go, and holds
    back no more.

    Threading: every method may be called from any thread.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._waiting: list[weakref.ref[PostedRead]] = []
        self._closed = False

    @property
    def count(self) -> int:
        """Chunks that are held back now."""
        with self._changed:
            return len(self._living())

    def wait(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until at least `count` chunks are held back.

        Args:
            count: how many.
            timeout: seconds.

        Raises:
            TimeoutError: they were not posted in time.
        """
        count = arguments.integer("count", count, 1)
        timeout = arguments.seconds("timeout", timeout, zero=True)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._living()) >= count, timeout):
                held = len(self._living())
                raise TimeoutError(f"{held} chunks are held back after {timeout:g} s, where {count} were waited for")

    def release(self, count: int | None = None) -> None:
        """Let chunks go, the oldest first; their bytes arrive within milliseconds, on the threads that read.

        Args:
            count: how many; None: all that are held back now.

        Raises:
            InvalidField: fewer are held back: `wait` for them first.
        """
        with self._changed:
            held = self._living()
            going = len(held) if count is None else arguments.integer("count", count, 1)
            if going > len(held):
                raise InvalidField("count", going, f"at most the {len(held)} chunks that are held back")
            for read in held[:going]:
                read.let_go = True

    def close(self) -> None:
        """Let everything go, and hold back no more. Idempotent."""
        self._ended()

    def __enter__(self) -> HeldReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What follows is for the fabric.

    def _add(self, read: PostedRead) -> None:
        """Hold a read back, if this has not ended."""
        with self._changed:
            if self._closed:
                read.let_go = True
            else:
                self._waiting.append(weakref.ref(read))
                self._changed.notify_all()

    def _let_all_go(self) -> None:
        """Everything is let go, now and later."""
        with self._changed:
            self._closed = True
            for read in self._living():
                read.let_go = True

    def _living(self) -> list[PostedRead]:
        """With the lock held: what is held back, and can still arrive."""
        found = [read for kept in self._waiting if (read := kept()) is not None and not read.let_go]
        self._waiting = [weakref.ref(read) for read in found]
        return found
