"""Says that a read is no longer wanted, and interrupts what waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import TransferCancelled


class Cancellation:
    """Cancels a read, and interrupts what waits for it. Thread-safe."""

    def __init__(self, read_id: str) -> None:
        self._read_id = read_id
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._interrupt: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the read was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Cancel the read, and interrupt the wait. Idempotent."""
        with self._lock:
            self._cancelled.set()
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    def check(self) -> None:
        """Raise `TransferCancelled` if the read was cancelled."""
        if self.cancelled:
            raise TransferCancelled(f"read {self._read_id} was cancelled", read_id=self._read_id)

    def interrupt_by(self, interrupt: Callable[[], None] | None) -> None:
        """Set the function that interrupts the present wait; calls it at once if the read was already cancelled."""
        with self._lock:
            self._interrupt = interrupt
        if self.cancelled and interrupt is not None:
            interrupt()
