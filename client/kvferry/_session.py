"""The source side: an engine's session, as its engine sees it."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry import _arguments as arguments
from kvferry._clock import now
from kvferry._control.connection import CALL_TIMEOUT
from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Release
from kvferry._forks import OneProcess
from kvferry._wire.token import EngineToken
from kvferry.geometry.blocks import Blocks


class EngineSession(OneProcess):
    """An engine as its home knows it. Made by `Client.open_engine`, in the one process that chooses the incarnation.

    Threading: every method may be called from any thread. `publish`, `publish_more` and `abort` make a call and wait
    for its answer; `released` waits as long as it is told.

    Attributes:
        spec: the engine.
    """

    def __init__(self, session: HomeSession) -> None:
        self.spec = session.spec
        self._session = session

    @property
    def token(self) -> EngineToken:
        """What the engine's other processes need. Secret."""
        return self._session.token

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with; see `Cache.warm`. A capability."""
        return self.token.engine_reference

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        expected_reads: int = 1,
        payload: bytes = b"",
        checksums: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> Publication:
        """Offer a request's blocks. From now until `released` the source neither changes nor frees them (R2).

        Args:
            request_id: the source's request, 1 to 256 bytes.
            blocks: by group; `Blocks.end_token` says how many tokens of the last block are there.
            last: no more blocks will follow; else `publish_more`.
            expected_reads: reads that will be made (n-way sampling).
            payload: opaque bytes for the readers, at most 64 KiB.
            checksums: every rank will call `Cache.checksum`, so that readers in integrity mode wait for the sums.
            timeout: seconds to keep trying.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine, one is given twice, or a read is writing to
                one; or another argument is out of range.
            MessageTooLarge: the blocks do not fit a message; publish them in several steps. Nothing was published.
            Unavailable: the home could not be reached. Whether the publication exists is not known, so it is aborted as
                well as can be, and its blocks stay pinned until `released` comes, once. Or another thread's `publish`
                took all the time; then nothing was published.
            KvferryError: the home refused; nothing was published.
        """
        return self._session.publish(
            request_id,
            blocks,
            last=last,
            expected_reads=expected_reads,
            payload=payload,
            checksums=checksums,
            timeout=arguments.seconds("timeout", timeout),
        )

    def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes = b"",
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        """Offer the next blocks of a publication that was not the last; each group goes on where it ended. Errors as
        `publish`."""
        timeout = arguments.seconds("timeout", timeout)
        step = self._session.offer_more(publication, blocks, last=last, payload=payload)
        self._session.send(step, timeout)

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Stop new reads of a publication. Its blocks stay pinned until `released`, which comes within max_ttl (R2)."""
        self._session.abort(publication, arguments.seconds("timeout", timeout))

    def released(self, timeout: float = 0.0) -> list[Release]:
        """What was released since the last call; each publication exactly once (R3).

        Args:
            timeout: seconds to wait for the first; 0: only what is there.
        """
        return self._session.released(now() + arguments.seconds("timeout", timeout, zero=True))

    def unreleased(self) -> tuple[Publication, ...]:
        """Publications whose blocks are still pinned."""
        return self._session.unreleased()

    def close(self) -> None:
        """End the session. Leases at the home run on; nothing more is learned of them. Idempotent."""
        self._session.close()


def home_session_of(session: EngineSession) -> HomeSession:
    """What stands behind a session: for the rest of kvferry."""
    return session._session
