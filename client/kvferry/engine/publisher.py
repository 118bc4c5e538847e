"""The source side of a scheduler: sends publications to the home, in order, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial

from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Release, ReleaseOutcome, Step
from kvferry._work_queue import WorkQueue
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks

logger = logging.getLogger(__name__)


class Publishing:
    """Publishes the requests of one engine. Thread-safe; only `close` waits.

    Attributes:
        published, released: numbers of publications since the start. ``published - released`` are pinned.
        refused: number of released publications that the home did not accept.
    """

    def __init__(self, session: HomeSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._refused: deque[Release] = deque()
        self.published = self.released = self.refused = 0
        self._work = WorkQueue(f"kvferry-publish-{session.spec.engine_id}")

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        expected_reads: int,
        payload: bytes,
        checksums: bool,
    ) -> Publication:
        """See `SchedulerPort.publish`."""
        with self._lock:
            # Number and queue the publication under one lock: the home rejects a number below the highest it has seen.
            publication, step = self._session.offer(
                request_id, blocks, last=last, expected_reads=expected_reads, payload=payload, checksums=checksums
            )
            self.published += 1
            self._work.do(partial(self._send, publication, step))
        return publication

    def publish_more(
        self, publication: Publication, blocks: Mapping[str, Blocks], *, last: bool, payload: bytes
    ) -> None:
        """See `SchedulerPort.publish_more`."""
        with self._lock:
            step = self._session.offer_more(publication, blocks, last=last, payload=payload)
            self._work.do(partial(self._send, publication, step))

    def abort(self, publication: Publication) -> None:
        """See `SchedulerPort.abort`."""
        self._work.do(partial(self._abort, publication))

    def take_released(self) -> list[Release]:
        """Return the publications released since the last call; each appears exactly once."""
        found = self._session.released()
        with self._lock:
            found += self._refused
            self._refused.clear()
            self.released += len(found)
        return found

    def close(self, timeout: float) -> None:
        """Send what is queued, then end the thread.

        Args:
            timeout: seconds to wait for it.
        """
        self._work.close(timeout)

    # The methods below run on the work queue's thread.

    def _send(self, publication: Publication, offered: Step) -> None:
        step = offered.message
        try:
            self._session.send(offered)
        except KvferryError as error:
            logger.warning("could not send step %d of publication %d: %s", step.step, publication.number, error)
            if error.retryable:
                # The home may have accepted it: it stays pinned until it is released.
                return
            if step.step > 0:
                self._abort(publication)
                return
            with self._lock:
                self.refused += 1
                self._refused.append(
                    Release(publication.number, publication.request_id, ReleaseOutcome.ABORTED, local=True)
                )

    def _abort(self, publication: Publication) -> None:
        try:
            self._session.abort(publication)
        except KvferryError as error:
            logger.warning("could not abort publication %d: %s", publication.number, error)
