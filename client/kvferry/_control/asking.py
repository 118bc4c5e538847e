"""Asks an engine for a prefix, and acquires the answer: a publication under a reference that the asker has made, as a
router would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry._control.acquire_request import Acquired
from kvferry._control.acquisition import Acquisition
from kvferry._control.backoff import retrying
from kvferry._control.questions import AskedPrefix
from kvferry._wire.outcomes import MissReason
from kvferry.errors import (
    BlocksShort,
    EngineUnknown,
    KvferryError,
    NotFound,
    NotPublished,
    PeerRestarted,
    PrefixMiss,
    PublicationAborted,
    PublicationReleased,
    PublicationTimeout,
    Refused,
)
from kvferry.v1 import kv_transfer_pb2 as pb

LATE_ANSWER = 1.0
"""Seconds after its wait for which an asker goes on: the home says then that there was no answer."""

SHORTEST_WAIT = 0.001
"""Seconds; zero would be the contract's default."""

ENDED = (PublicationAborted, PublicationReleased, NotPublished, PublicationTimeout)
"""Ends of an answer before it could be read: the source has withdrawn it, or its home, which has restarted, knows no
such question."""

STOPPED = (PeerRestarted, EngineUnknown)
"""Of an engine that has been asked: it was stopped before it answered."""


class AskingAcquisition(Acquisition):
    """The acquisition of what an engine is asked for. `withdraw` is called if an answer may come, or has come, and
    nobody will read it. Not if the home has not taken the question: then it cannot be reached, and has no question
    after a moment."""

    def __init__(self, prefix: AskedPrefix, withdraw: Callable[[], object], *given: Any) -> None:
        super().__init__(*given)
        self._prefix = prefix
        self._withdraw = withdraw

    async def first(self) -> Acquired:
        """Ask the engine, and wait for its answer; see `Acquisition.first`. Raises `PrefixMiss` if there is nothing to
        read, or no answer has come in time; another error if the home has refused the question, or the answer is of
        another prompt."""
        until, taken = self._loop.now() + self._prefix.wait, False
        asking, silent = asyncio.current_task(), False

        def too_late() -> None:
            # `asyncio.wait_for` before Python 3.12 loses a cancellation that comes together with the answer.
            nonlocal silent
            if asking is not None:
                silent = asking.cancel()

        # The blocks have to be there in time, and not only the lease: the engine waits instead of computing.
        timer = self._loop.at(until + LATE_ANSWER, too_late)
        try:
            await retrying(lambda left: self._tell(until, left), until)
            taken = True
            return await super().first()
        except asyncio.CancelledError:
            self._withdraw()
            if not silent:
                raise
            raise _missed(self._request.reference.engine_id, None) from None
        except KvferryError as error:
            # A home that refuses the read, or says that there is nothing, has no question any more.
            if taken and not isinstance(error, (Refused, NotFound)):
                self._withdraw()
            ends = (*ENDED, *STOPPED) if taken else ENDED
            raise _missed(self._request.reference.engine_id, error, ends) from None
        finally:
            timer.cancel()

    async def _tell(self, until: float, left: float) -> None:
        """Tell the home the question, in at most `left` seconds."""
        request, wait = self._request, max(SHORTEST_WAIT, until - self._loop.now())
        question = self._prefix.message(request.text, wait)
        with request.span.calling():
            await request.home.notify_one(pb.NotifyRequest(sender=self._asked.reader, notifications=[question]), left)


def _missed(engine_id: str, error: KvferryError | None, ends: tuple[type[KvferryError], ...] = ()) -> KvferryError:
    """Return the error with which a question ends; None: its home is silent. Those of `ends` are no answer."""
    if isinstance(error, BlocksShort):
        problem, why = f"has published another part: {error}", MissReason.NOT_CACHED
    elif error is None or error.retryable or isinstance(error, ends):
        problem, why = f"has not answered in time: {error or 'its home is silent'}", MissReason.NO_ANSWER
    else:
        return error
    return PrefixMiss(f"engine {engine_id!r} was asked for a prefix, and {problem}", engine_id=engine_id, why=why.name)
