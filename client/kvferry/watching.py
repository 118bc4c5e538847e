"""One process's Watch: its liveness at its own node server, and what that server tells it. A thread that mostly
sleeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry.clock import now
from kvferry.control import BACKOFF_FIRST, BACKOFF_LAST, Control, Stream
from kvferry.errors import Closed, KvferryError, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


class Watcher:
    """Keeps a Watch open, resuming it after every loss until closed or refused for good.

    Threading: `on_event` runs on the watcher's thread, one event at a time; it may make calls but must not wait for
        long.
    """

    def __init__(
        self,
        control: Control,
        request: pb.WatchRequest,
        on_event: Callable[[pb.WatchResponse], None],
        name: str,
    ) -> None:
        self._control = control
        self._request = request
        self._on_event = on_event
        self._lock = threading.Lock()
        self._stream: Stream[pb.WatchResponse] | None = None
        self._closing = threading.Event()
        self._synced = threading.Event()
        self._failure: KvferryError | None = None
        self.opened: pb.WatchOpened | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvferry-watch-{name}", daemon=True)

    def open(self, timeout: float) -> pb.WatchOpened:
        """Start, and wait for the full state.

        Raises:
            KvferryError: the node server refused, or could not be reached within `timeout` seconds.
        """
        deadline = now() + timeout
        self._thread.start()
        while not self._synced.wait(max(0.0, min(0.1, deadline - now()))):
            if not self._thread.is_alive() or now() >= deadline:
                break
        opened, failure = self.opened, self._failure
        if self._synced.is_set() and opened is not None:
            return opened
        self.close()
        raise failure or Unreachable(
            f"{self._control.address} did not open a Watch within {timeout} s", address=self._control.address
        )

    @property
    def failure(self) -> KvferryError | None:
        """Why the Watch ended for good, if it did."""
        return self._failure if not self._thread.is_alive() else None

    def close(self) -> None:
        """End the Watch. Idempotent; callable from any thread."""
        self._closing.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        backoff = BACKOFF_FIRST
        while not self._closing.is_set():
            try:
                self._follow()
                backoff = BACKOFF_FIRST
                pause = backoff
            except KvferryError as error:
                if self._closing.is_set():
                    return
                self._failure = error
                if not error.retryable:
                    logger.warning("watch at %s ended: %s", self._control.address, error)
                    self._synced.set()
                    return
                pause = max(backoff, error.retry_after or 0.0)
                backoff = min(2 * backoff, BACKOFF_LAST)
            self._closing.wait(pause)

    def _follow(self) -> None:
        with self._lock:
            if self._closing.is_set():
                raise Closed("the watch is closed")
            stream = self._stream = self._control.watch(self._request)
        for message in self._control.typed(stream):
            kind = message.WhichOneof("event")
            if kind == "opened":
                self.opened = message.opened
            self._on_event(message)
            if self._request.resume_epoch != message.home_epoch:
                # Another home, or this one restarted: its sequence has begun anew.
                self._request.resume_epoch = message.home_epoch
                self._request.resume_sequence = 0
            self._request.resume_sequence = max(message.sequence, self._request.resume_sequence)
            if kind == "synced" or (kind == "opened" and message.opened.resumed):
                self._failure = None
                self._synced.set()
