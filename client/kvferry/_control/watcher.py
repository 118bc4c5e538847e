"""The Watch of one process: shows its node server that the process is alive, and receives events. Its thread mostly
sleeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.connection import SILENCE, Control, Stream
from kvferry._control.exits import ends_at_exit
from kvferry._threads import start_loop
from kvferry.errors import (
    Closed,
    ContractDiffers,
    EngineUnknown,
    InvalidInput,
    KvferryError,
    NotFound,
    Refused,
    Unavailable,
    Unreachable,
)
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


class Watcher:
    """Keeps a Watch open: resumes it after every loss, until it is closed or refused for good.

    If the handler raises for an event, the events after it are handled, and then the Watch is opened again for its full
    state, which includes that of the failed event.

    Threading: `on_event` runs on the watcher's thread, one event at a time. It may make RPCs, but must not wait for
    long.

    Args:
        control: connection to the node server.
        request: opens the Watch. The watcher changes it.
        on_event: the handler of events.
        name: name of the process, for logs and the thread.

    Attributes:
        opened: the first event of the last Watch; None before.
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
        self._name = name
        self._missed = False
        """Whether the handler has raised, so that the full state must be fetched again."""
        self._again_after = 0.0
        """Seconds after which to fetch it, according to the handler's error."""
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None
        ends_at_exit(self)

    def open(self, timeout: float) -> pb.WatchOpened:
        """Start, and wait for the full state.

        Args:
            timeout: seconds to wait.

        Returns:
            The first event of the Watch.

        Raises:
            KvferryError: the node server refused, or could not be reached in time.
        """
        began = now()
        deadline, warned = began + timeout, False
        thread = self._thread = start_loop(self._turn, f"kvferry-watch-{self._name}")
        while not self._synced.wait(max(0.0, min(0.1, deadline - now()))):
            if not thread.is_alive() or now() >= deadline:
                break
            if not warned and now() >= began + SILENCE:
                warned = True
                reason = self._failure.message if self._failure is not None else "there is no answer yet"
                logger.warning("still waiting for the Watch of %s at %s: %s", self._name, self._control.address, reason)
        opened, failure = self.opened, self._failure
        if self._synced.is_set() and opened is not None:
            return opened
        self.close()
        raise failure or Unreachable(
            f"{self._control.address} did not open a Watch within {timeout} s", address=self._control.address
        )

    @property
    def failure(self) -> KvferryError | None:
        """The error with which the Watch ended for good, or the `ContractDiffers` for which it cannot be opened now.
        None: neither."""
        failure = self._failure
        ended = self._thread is not None and not self._thread.is_alive()
        return failure if ended or isinstance(failure, ContractDiffers) else None

    def close(self) -> None:
        """End the Watch. Idempotent; may be called from any thread."""
        self.end_calls()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def end_calls(self) -> None:
        """See `exits.Ending`."""
        self._closing.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def calls(self) -> list[threading.Thread]:
        """See `exits.Ending`: the connection knows the others."""
        return [self._thread] if self._thread is not None else []

    def _turn(self) -> bool:
        try:
            self._follow()
            pause = self._backoff.next()
        except KvferryError as error:
            if self._closing.is_set():
                return False
            self._warn(error)
            # Its traceback would keep the stream.
            self._failure = error.with_traceback(None)
            if self._is_refusal(error):
                return False
            pause = self._backoff.next(error.retry_after)
        return not self._closing.wait(pause)

    def _warn(self, error: KvferryError) -> None:
        """Warn of an error other than an unreachable node server; once while the error stays the same."""
        if self._is_refusal(error):
            logger.warning("the watch of %s at %s ended: %s", self._name, self._control.address, error)
        elif not error.retryable and type(self._failure) is not type(error):
            message = "the watch of %s at %s was interrupted and is opened again: %s"
            logger.warning(message, self._name, self._control.address, error)

    def _is_refusal(self, error: KvferryError) -> bool:
        """Return whether the node server has refused the Watch for good.

        An internal error of the node server, or an answer that gRPC could not decode, is not a refusal. Nor is, for a
        Watch that was open before, a home that does not know the engine: it has restarted, or was cut off, and the
        engine's scheduler may be the last to come back. Nor a node server of another release: whoever installed it may
        take it back, and to start an engine takes minutes.
        """
        if isinstance(error, EngineUnknown | ContractDiffers) and self._synced.is_set():
            return False
        return not error.retryable and isinstance(error, (InvalidInput, Refused, NotFound, Closed))

    def _follow(self) -> None:
        """Follow one Watch until it ends, or until its full state is complete after the handler has raised."""
        if self._missed:
            self._request.resume_epoch, self._request.resume_sequence = b"", 0
            self._missed, self._again_after = False, 0.0
        with self._lock:
            if self._closing.is_set():
                raise Closed("the watch is closed")
            stream = self._stream = self._control.watch(self._request)
        try:
            self._take(stream)
        finally:
            stream.cancel()
            with self._lock:
                self._stream = None

    def _take(self, stream: Stream[pb.WatchResponse]) -> None:
        synced = False
        for message in self._control.typed(stream):
            kind = message.WhichOneof("event")
            if kind == "opened":
                self.opened = message.opened
            self._handle(message)
            if self._request.resume_epoch != message.home_epoch:
                # Another home, or this one after a restart: its sequence numbers start again.
                self._request.resume_epoch = message.home_epoch
                self._request.resume_sequence = 0
            self._request.resume_sequence = max(message.sequence, self._request.resume_sequence)
            synced |= kind == "synced" or (kind == "opened" and message.opened.resumed)
            if synced and self._missed:
                missed = f"events of {self._name} at {self._control.address} could not be handled"
                raise Unavailable(missed, retry_after=self._again_after)
            if synced and not self._synced.is_set():
                self._synced.set()
            if synced:
                self._failure = None
                self._backoff.reset()

    def _handle(self, message: pb.WatchResponse) -> None:
        try:
            self._on_event(message)
        except KvferryError as error:
            self._missed, self._again_after = True, max(self._again_after, error.retry_after or 0.0)
            logger.warning("event %s of %s could not be handled: %s", message.WhichOneof("event"), self._name, error)
        except Exception:
            self._missed = True
            logger.exception("event %s of %s could not be handled", message.WhichOneof("event"), self._name)
