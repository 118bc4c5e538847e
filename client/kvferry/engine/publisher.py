"""The source side of a scheduler: publishes requests without waiting, and tells of their releases."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from kvferry._control.home_session import HomeSession
from kvferry._control.publication_sender import PublicationSender
from kvferry._control.publications import Publication, Release, ReleaseOutcome
from kvferry._prompt import Prompt
from kvferry.geometry.blocks import Blocks


class Publishing:
    """Publishes the requests of one engine. Thread-safe; only `close` waits.

    Attributes:
        published, released: numbers of publications since the start. ``published - released`` are pinned.
        refused: number of released publications that the home did not accept.

    Raises:
        LimitReached: the system refused another thread.
    """

    def __init__(self, session: HomeSession) -> None:
        self._session = session
        self._refused: deque[Release] = deque()
        self.published = self.released = self.refused = 0
        self._sender = PublicationSender(session, self._on_refused)

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        expected_reads: int,
        payload: bytes,
        checksums: bool,
        traceparent: str,
        reference: str,
        layers: Collection[str] | None,
        prompt: Prompt,
    ) -> Publication:
        """See `SchedulerPort.publish`."""
        with self._sender.lock:
            publication, step = self._session.offer(
                request_id,
                blocks,
                last=last,
                expected_reads=expected_reads,
                payload=payload,
                checksums=checksums,
                traceparent=traceparent,
                reference=reference,
                layers=layers,
                prompt=prompt,
            )
            self.published += 1
            self._sender.put(publication, step)
        return publication

    def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes,
        layers: Collection[str] | None,
        prompt: Prompt,
    ) -> None:
        """See `SchedulerPort.publish_more`."""
        with self._sender.lock:
            step = self._session.offer_more(
                publication, blocks, last=last, payload=payload, layers=layers, prompt=prompt
            )
            self._sender.put(publication, step)

    def abort(self, publication: Publication) -> None:
        """See `SchedulerPort.abort`."""
        with self._sender.lock:
            self._sender.put(publication)

    def take_released(self) -> list[Release]:
        """Return the publications released since the last call; each appears exactly once."""
        found = self._session.released()
        with self._sender.lock:
            found += self._refused
            self._refused.clear()
            self.released += len(found)
        return found

    def close(self, timeout: float) -> None:
        """Send what is queued, then end the thread.

        Args:
            timeout: seconds to wait for it.
        """
        self._sender.close(timeout)

    def _on_refused(self, publication: Publication) -> None:
        """Release a publication that the home did not accept; called with the sender's lock held."""
        self.refused += 1
        self._refused.append(Release(publication.number, publication.request_id, ReleaseOutcome.ABORTED, local=True))
