"""Acknowledges releases to the home, in batches and without waiting, so that a slow home does not delay the Watch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvferry._control.connection import CALL_TIMEOUT, Control, checked_results
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

MOST = 8192
"""Most publication numbers in one call: they take at most 80 KiB."""

AGAIN = 1.0
"""Seconds until a failed call is repeated."""


class Acknowledgements:
    """Acknowledges the releases of one engine. Makes one call at a time; releases in the meantime go with the next.

    A call without an answer is repeated as long as its error is retryable. A home that refuses repeats the release in
    its next full state.

    Threading: thread-safe; nothing here waits.

    Args:
        home: connection to the engine's home.
    """

    def __init__(self, home: Control) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._calling = False
        """Whether a call is in progress, or waits for its next attempt."""
        self._closed = False

    def close(self) -> None:
        """Stop repeating failed calls. Idempotent."""
        self._closed = True

    def add(self, publication: int, sender: pb.NotifyRequest) -> None:
        """Acknowledge the release of a publication.

        Args:
            publication: number of the publication.
            sender: a request that names the engine, without notifications.
        """
        with self._lock:
            self._waiting.add(publication)
            if self._calling:
                return
            self._calling = True
        self._send(sender)

    def _send(self, sender: pb.NotifyRequest) -> None:
        with self._lock:
            numbers = sorted(self._waiting)[:MOST]
        request = pb.NotifyRequest()
        request.CopyFrom(sender)
        request.notifications.add(released_ack=pb.ReleasedAck(publications=numbers))

        def answered(answer: list[pb.NotificationResult] | KvferryError) -> None:
            try:
                if isinstance(answer, KvferryError):
                    raise answer
                checked_results(request, answer, self._home.address)
            except KvferryError as error:
                self._failed(error, sender)
                return
            self._taken(numbers, sender)

        self._home.notify_later(request, CALL_TIMEOUT, answered)

    def _failed(self, error: KvferryError, sender: pb.NotifyRequest) -> None:
        if error.retryable and not self._closed:
            again = threading.Timer(max(AGAIN, error.retry_after or 0.0), self._send, (sender,))
            again.daemon = True
            # Without a thread for it, the next release tries again.
            with suppress(RuntimeError):
                again.start()
                return
        with self._lock:
            self._calling = False
        if not self._closed:
            logger.info("could not acknowledge releases: %s", error)

    def _taken(self, numbers: Sequence[int], sender: pb.NotifyRequest) -> None:
        with self._lock:
            self._waiting.difference_update(numbers)
            self._calling = bool(self._waiting)
            more = self._calling
        if more:
            self._send(sender)
