"""Asks an engine for a prefix, and acquires the answer: a publication under a reference that the asker has made, as a
router would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry._control.acquisition import Acquired, AcquireRequest, Acquisition
from kvferry._control.questions import AskedPrefix, MissReason
from kvferry._control.retrying import retrying
from kvferry._loop import Loop
from kvferry.errors import BlocksShort, KvferryError, NotFound, PrefixMiss, PublicationTimeout, Refused
from kvferry.v1 import kv_transfer_pb2 as pb

LATE_ANSWER = 1.0
"""Seconds after its wait for which an asker goes on: the home says then that there was no answer."""

SHORTEST_WAIT = 0.001
"""Seconds; zero would be the contract's default."""


async def answer_of(
    loop: Loop,
    request: AcquireRequest,
    asked: AskedPrefix,
    reader: pb.EngineRef,
    acquisition: Acquisition,
    withdraw: Callable[[], object],
) -> Acquired:
    """Ask an engine, and wait for its answer, as `Acquisition.first` does.

    `withdraw` is called if the question may be open, or an answer may come, and nobody will read it.

    Raises:
        PrefixMiss: there is nothing to read, or no answer has come in time.
        KvferryError: the home has refused the question, or the answer is of another prompt.
    """
    until = loop.now() + asked.wait

    async def ask(left: float) -> None:
        wait = max(SHORTEST_WAIT, until - loop.now())
        question = pb.NotifyRequest(sender=reader, notifications=[asked.message(request.text, wait)])
        with request.span.calling():
            await request.home.notify_one(question, left)

    try:
        await retrying(ask, until)
        # The answer has to be there in time, and not only the lease: the engine waits for it instead of computing.
        first = acquisition.first(lambda found: asked.check(found.blocks, complete=found.complete))
        return await asyncio.wait_for(first, until + LATE_ANSWER - loop.now())
    except asyncio.CancelledError:
        withdraw()
        raise
    except (KvferryError, asyncio.TimeoutError) as error:
        # A home that refuses has no question, and one that says that there is nothing has none any more.
        if not isinstance(error, (Refused, NotFound)):
            withdraw()
        raise _missed(request.reference.engine_id, error) from None


def _missed(engine_id: str, error: Exception) -> Exception:
    """Return the error with which a question ends."""
    if isinstance(error, BlocksShort):
        problem, why = f"has published another part: {error}", MissReason.NOT_CACHED
    elif not isinstance(error, KvferryError) or error.retryable or isinstance(error, PublicationTimeout):
        problem, why = f"has not answered in time: {str(error) or 'its home is silent'}", MissReason.NO_ANSWER
    else:
        return error
    return PrefixMiss(f"engine {engine_id!r} was asked for a prefix, and {problem}", engine_id=engine_id, why=why.name)
