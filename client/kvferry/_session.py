"""The session of an engine with its home: publishing blocks, and getting them back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import KW_ONLY, dataclass

from kvferry import _arguments as arguments
from kvferry._control.backoff import CALL_TIMEOUT
from kvferry._control.home_session import HomeSession
from kvferry._control.publications import Publication, Release
from kvferry._control.publish import Publish, PublishMore
from kvferry._control.questions import Question
from kvferry._forks import Closing, OneProcess
from kvferry._wire.outcomes import MissReason
from kvferry._wire.token import EngineToken

LOOK_EVERY = 1.0
"""Seconds after which `EngineSession.releases` checks whether a final deadline has passed."""


@dataclass(frozen=True)
class _Waiting:
    """A further argument of methods that wait: the seconds to keep trying."""

    _: KW_ONLY
    timeout: float = CALL_TIMEOUT


@dataclass(frozen=True)
class SessionPublish(_Waiting, Publish):
    """The arguments of `EngineSession.publish`."""


@dataclass(frozen=True)
class SessionPublishMore(_Waiting, PublishMore):
    """The arguments of `EngineSession.publish_more`."""


class EngineCalls(OneProcess):
    """The calls that an engine's session has in common with its `SchedulerPort`, also in asyncio; all return at once.

    Attributes:
        spec: the engine.
    """

    def __init__(self, session: HomeSession) -> None:
        self.spec = session.spec
        self._session = session

    @property
    def token(self) -> EngineToken:
        """The token with which the engine's other processes join it. Secret; pass ``str(token)`` in an environment
        variable."""
        return self._session.token

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for `Cache.warm` and `WorkerPort.warm`. A
        capability."""
        return self.token.engine_reference

    def miss(self, question: Question, reason: MissReason) -> None:
        """Answer a question with nothing. Does nothing for a question that has ended.

        Raises:
            InvalidField: an argument has the wrong type, or the reason is NO_ANSWER, which only homes give.
        """
        self._session.miss(question, reason)


class EngineSession(EngineCalls, Closing):
    """The session of one incarnation of an engine with its home: publishes blocks, and reports their releases.

    Made by `Client.open_engine`, in one process of the engine.

    Threading: every method may be called from any thread. `publish`, `publish_more` and `abort` make an RPC and wait
    for its answer; `released` waits for at most its `timeout`.
    """

    @arguments.takes(SessionPublish)
    def publish(self, given: SessionPublish) -> Publication:
        """Publish a request's blocks. The engine must not change or free the blocks until `released` returns the
        publication (R2).

        Args:
            given: each field of `Publish` is an argument of its own, and so is `timeout`, the seconds to keep trying:
                ``publish("r7", {"full": Blocks([3, 4])}, last=False, timeout=2.0)``.

        Returns:
            The publication, with its number, and with its reference and its traceparent for the router.

        Raises:
            BadReference, RouterKeyUsed: `reference` is not a reference, or was used for another publication.
            BadBlock, InvalidField: a block does not belong to this engine, is given twice, or is being written to by a
                read; or another argument is out of range.
            MessageTooLarge: the blocks do not fit into one message; publish them in several steps. Nothing was
                published.
            KvferryError: the home refused the publication, or could not be reached in time (`Unavailable`). The session
                withdraws the publication, and `released` returns it once; its blocks stay pinned until then. Such an
                error, of any class, has the publication's number in ``values["withdrawn"]``; after any other error,
                nothing was published, and nothing is released.
        """
        return self._session.publish(given, arguments.seconds("timeout", given.timeout))

    @arguments.takes(SessionPublishMore)
    def publish_more(self, given: SessionPublishMore) -> None:
        """Publish the next blocks of a publication that is not complete yet. Each group continues where it ended.

        Args:
            given: each field of `PublishMore` is an argument of its own, and so is `timeout`:
                ``publish_more(publication, blocks, last=True)``.

        Raises:
            WrongState: the publication is complete, or was released.
            KvferryError: see `publish`.
        """
        self._session.publish_more(given, arguments.seconds("timeout", given.timeout))

    def abort(self, publication: Publication, timeout: float = CALL_TIMEOUT) -> None:
        """Withdraw a publication: the home refuses new reads. The blocks stay pinned until `released` returns the
        publication, within the home's max_ttl (R2). Raises the error if the home refused, or could not be reached."""
        arguments.instance("publication", publication, Publication, "the Publication that publish returned")
        self._session.abort(publication, arguments.seconds("timeout", timeout))

    def released(self, timeout: float = 0.0) -> list[Release]:
        """Return the publications released since the last call, each exactly once (R3): their blocks may be changed and
        freed. Waits at most `timeout` seconds for the first one."""
        return self._session.released(arguments.seconds("timeout", timeout, zero=True))

    async def releases(self) -> AsyncIterator[Release]:
        """Yield releases in asyncio as they come, on any event loop, until the session is closed: ``async for release
        in session.releases()``. `released` does not return these again."""
        while not self._session.closed:
            # One at a time: nobody would get the others if the caller leaves the loop.
            while found := self._session.released(most=1):
                yield found[0]
            await self._session.news.arrive(LOOK_EVERY)

    def questions(self, timeout: float = 0.0) -> list[Question]:
        """Return the questions of other engines since the last call, each exactly once; see `SchedulerPort.questions`
        for the answers. Waits at most `timeout` seconds for the first one."""
        return self._session.questions(arguments.seconds("timeout", timeout, zero=True))

    def unreleased(self) -> tuple[Publication, ...]:
        """Return the publications whose blocks are still pinned."""
        return self._session.unreleased()

    def close(self) -> None:
        """End the session and its incarnation: another start of the engine is accepted at once. Idempotent.

        The home grants no new leases, and renews none. Live leases run to their ends, for at most the home's max_ttl
        (30 s), and `released` returns nothing any more: before the memory is used for another purpose, wait for the
        releases, or let `Cache.reuse_after` of the next start pass. The call takes at most a second if the home cannot
        be reached; the incarnation then counts as alive until its engine_ttl (10 s) is over.
        """
        self._session.close()


def home_session_of(session: EngineSession) -> HomeSession:
    """Return the internal session behind a public one, for the rest of kvferry."""
    return session._session
