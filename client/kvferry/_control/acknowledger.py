"""Acknowledgements of releases: many may come at once, and a home that is slow must not hold up the Watch that tells
them."""

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
"""Numbers in one call: at most 80 KiB."""

AGAIN = 1.0
"""Seconds until a call that failed is made again."""


class Acknowledgements:
    """Releases that one engine has taken note of. One call at a time; what comes meanwhile goes with the next.

    Threading: thread-safe; nothing here waits. What is not answered is sent again, for as long as repeating can help; a
    home that refuses tells of the release again in its next full state.

    Args:
        home: whom to tell.
    """

    def __init__(self, home: Control) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._calling = False
        """A call is under way, or waits for its next attempt."""
        self._closed = False

    def close(self) -> None:
        """Send nothing again any more. Idempotent."""
        self._closed = True

    def add(self, publication: int, sender: pb.NotifyRequest) -> None:
        """Acknowledge the release of a publication.

        Args:
            publication: its number.
            sender: who speaks, as a request without notifications.
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
            logger.info("releases not acknowledged: %s", error)

    def _taken(self, numbers: Sequence[int], sender: pb.NotifyRequest) -> None:
        with self._lock:
            self._waiting.difference_update(numbers)
            self._calling = bool(self._waiting)
            more = self._calling
        if more:
            self._send(sender)
