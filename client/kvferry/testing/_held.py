"""Reads that are held back until a test releases them."""

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
    """A read that was posted, or is about to be. Only its agent keeps a reference to the read, so that the bytes never
    arrive if the agent has ended.

    Attributes:
        peer: name of the source agent.
        source, destination, length: addresses and lengths in bytes, ``uint64[n]``.
        connects: this is the first read from a peer, which reads a few bytes to connect.
        let_go: the bytes may move; changed by `HeldReads`.
        done: the bytes have moved.
    """

    peer: str
    source: Rows
    destination: Rows
    length: Rows
    connects: bool
    let_go: bool = False
    done: bool = False


class HeldReads:
    """Reads that were posted, and whose bytes are held back. Made by `Fabric.hold_reads`.

    Counts chunks, as they are posted to NIXL: one for each source rank that a rank reads from, or several if a read is
    larger than `NixlOptions.chunk_bytes`. Leaving the ``with`` block releases all chunks, and later reads are not held
    back.

    Threading: every method may be called from any thread.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._waiting: list[weakref.ref[PostedRead]] = []
        self._closed = False

    @property
    def count(self) -> int:
        """Number of chunks that are held back now."""
        with self._changed:
            return len(self._living())

    def wait(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until at least `count` chunks are held back.

        Args:
            count: number of chunks.
            timeout: seconds to wait.

        Raises:
            TimeoutError: fewer chunks were posted in time.
        """
        count = arguments.integer("count", count, 1)
        timeout = arguments.seconds("timeout", timeout, zero=True)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._living()) >= count, timeout):
                held = len(self._living())
                raise TimeoutError(f"{held} chunks are held back after {timeout:g} s, and {count} were expected")

    def release(self, count: int | None = None) -> None:
        """Release chunks, the oldest first. Reading threads then copy their bytes within milliseconds.

        Args:
            count: number of chunks; None: all that are held back now.

        Raises:
            InvalidField: fewer chunks are held back; `wait` for them first.
        """
        with self._changed:
            held = self._living()
            going = len(held) if count is None else arguments.integer("count", count, 1)
            if going > len(held):
                raise InvalidField("count", going, f"at most the {len(held)} chunks that are held back")
            for read in held[:going]:
                read.let_go = True

    def close(self) -> None:
        """Release all chunks, and hold back no more. Idempotent."""
        self._ended()

    def __enter__(self) -> HeldReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The fabric calls these.

    def _add(self, read: PostedRead) -> None:
        """Hold a read back, unless this object was closed."""
        with self._changed:
            if self._closed:
                read.let_go = True
            else:
                self._waiting.append(weakref.ref(read))
                self._changed.notify_all()

    def _let_all_go(self) -> None:
        """Release all chunks, and hold back no more."""
        with self._changed:
            self._closed = True
            for read in self._living():
                read.let_go = True

    def _living(self) -> list[PostedRead]:
        """Return the reads that are held back and whose agent has not ended. Called with the lock held."""
        found = [read for kept in self._waiting if (read := kept()) is not None and not read.let_go]
        self._waiting = [weakref.ref(read) for read in found]
        return found
