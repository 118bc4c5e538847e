"""The session of an engine with its home: publishing blocks, and getting them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvferry import _arguments as arguments
from kvferry._clock import now
from kvferry._control.connection import CALL_TIMEOUT
from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Release
from kvferry._forks import OneProcess
from kvferry._prompt import Prompt
from kvferry._wire.token import EngineToken
from kvferry.geometry.blocks import Blocks


class EngineSession(OneProcess):
    """The session of one incarnation of an engine with its home: publishes blocks, and reports their releases.

    Made by `Client.open_engine`, in one process of the engine.

    Threading: every method may be called from any thread. `publish`, `publish_more` and `abort` make an RPC and wait
    for its answer; `released` waits for at most its `timeout`.

    Attributes:
        spec: the engine.
    """

    def __init__(self, session: HomeSession) -> None:
        self.spec = session.spec
        self._session = session

    @property
    def token(self) -> EngineToken:
        """The token with which the engine's other processes join it. Secret."""
        return self._session.token

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for `Cache.warm`. A capability."""
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
        traceparent: str = "",
        reference: str = "",
        layers: Collection[str] | None = None,
        prompt: Prompt = Prompt.unknown,
    ) -> Publication:
        """Publish a request's blocks. The engine must not change or free them until `released` returns the publication
        (R2).

        Args:
            request_id: the source's name for the request, 1 to 256 bytes, printable.
            blocks: the blocks by group; `Blocks.end_token` is the end of the tokens that they hold.
            last: no more blocks will follow; if False, `publish_more` publishes them.
            expected_reads: how many reads will be made (n-way sampling); the blocks are released after the last.
            payload: opaque bytes for the readers, at most 64 KiB.
            checksums: every rank will call `Cache.checksum` for these blocks, so that readers in integrity mode wait
                for the sums.
            timeout: seconds to keep trying.
            traceparent: the W3C traceparent that came with the request; empty: none did. See docs/monitoring.md.
            reference: the reference that a router made for this request, and sent to the reader as well; empty: none
                did. See docs/routers.md.
            layers: names of the layers that are complete in these blocks; None: all. If some are not, `last` is False,
                and `publish_more` names the others.
            prompt: what the blocks are computed from, so that readers can refuse them for any other prompt. All of it,
                also if only a part is published.

        Returns:
            The publication, with its number, and with its reference and its traceparent for the router.

        Raises:
            BadReference, RouterKeyUsed: `reference` is not a reference, or was used for another publication.
            BadBlock, InvalidField: a block does not belong to this engine, is given twice, or is being written to by a
                read; or another argument is out of range.
            MessageTooLarge: the blocks do not fit into one message; publish them in several steps. Nothing was
                published.
            Unavailable: the home could not be reached, so it may or may not have the publication. The session tries to
                abort it, and `released` returns it once; its blocks stay pinned until then. Also raised if `publish`
                on another thread took all the time; then nothing was published.
            KvferryError: the home refused the publication; nothing was published.
        """
        return self._session.publish(
            request_id,
            blocks,
            last=last,
            expected_reads=expected_reads,
            payload=payload,
            checksums=checksums,
            timeout=arguments.seconds("timeout", timeout),
            traceparent=arguments.text("traceparent", traceparent),
            reference=arguments.text("reference", reference),
            layers=layers,
            prompt=prompt,
        )

    def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        payload: bytes = b"",
        layers: Collection[str] | None = None,
        timeout: float = CALL_TIMEOUT,
        prompt: Prompt = Prompt.unknown,
    ) -> None:
        """Publish the next blocks of a publication that is not complete yet. Each group continues where it ended.

        Args:
            publication: what `publish` returned.
            blocks: what groups gain; may be empty.
            last: no more blocks will follow.
            payload: opaque bytes for the readers, at most 64 KiB; with the last blocks.
            layers: names of the layers that are complete in the new blocks, which must be full blocks of groups of kind
                TOKENS. While some layers are not complete, further calls name more of them and give no blocks. A call
                without `layers` says that all are complete, and may give further blocks that are complete, too.
            timeout: seconds to keep trying.
            prompt: the prompt with what was generated since (`Prompt.followed_by`), if that is published.

        Raises:
            WrongState: the publication is complete, or was released.
            KvferryError: see `publish`.
        """
        timeout = arguments.seconds("timeout", timeout)
        step = self._session.offer_more(publication, blocks, last=last, payload=payload, layers=layers, prompt=prompt)
        self._session.send(step, timeout)

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Withdraw a publication: the home refuses new reads.

        The blocks stay pinned until `released` returns the publication, within the home's max_ttl (R2).

        Raises:
            KvferryError: the home refused, or could not be reached.
        """
        self._session.abort(publication, arguments.seconds("timeout", timeout))

    def released(self, timeout: float = 0.0) -> list[Release]:
        """Return the publications released since the last call: their blocks may be changed and freed.

        Each publication is returned exactly once (R3).

        Args:
            timeout: seconds to wait for the first one; 0: do not wait.
        """
        return self._session.released(now() + arguments.seconds("timeout", timeout, zero=True))

    def unreleased(self) -> tuple[Publication, ...]:
        """Return the publications whose blocks are still pinned."""
        return self._session.unreleased()

    def close(self) -> None:
        """End the session and its incarnation: another start of the engine is accepted at once. Idempotent.

        Nobody gets a new lease, and leases are not renewed. Those that are live run to their ends, for at most the
        home's max_ttl (30 s), and `released` reports nothing any more: before the memory is used for anything else,
        wait for the releases, or let `Cache.reuse_after` of the next start pass. The call takes at most a second if the
        home cannot be reached; the incarnation then counts as alive until its engine_ttl (10 s) is over.
        """
        self._session.close()


def home_session_of(session: EngineSession) -> HomeSession:
    """Return the internal session behind a public one, for the rest of kvferry."""
    return session._session
