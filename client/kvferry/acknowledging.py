"""Acknowledgements of releases: many may come at once, and a home that is slow must not hold up the Watch that tells
them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvferry.control import CALL_TIMEOUT, Control, checked_results
from kvferry.errors import Closed, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

MOST = 8192
"""Numbers in one call: at most 80 KiB."""


class Acknowledgements:
    """Releases that one engine has taken note of. One call at a time; what comes meanwhile goes with the next.

    Threading: thread-safe; nothing here waits. What is not answered is kept, and sent with the next: until then it
    stays part of the home's full state.

    Args:
        home: whom to tell.
    """

    def __init__(self, home: Control) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._calling = False

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
                with self._lock:
                    self._calling = False
                if not isinstance(error, Closed):
                    logger.info("%d releases not acknowledged: %s", len(numbers), error)
                return
            self._taken(numbers, sender)

        self._home.notify_later(request, CALL_TIMEOUT, answered)

    def _taken(self, numbers: Sequence[int], sender: pb.NotifyRequest) -> None:
        with self._lock:
            self._waiting.difference_update(numbers)
            self._calling = bool(self._waiting)
            more = self._calling
        if more:
            self._send(sender)
