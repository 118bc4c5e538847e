"""The asyncio client from an engine's start to its end: everything that the synchronous one does."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvferry import AsyncClient, Blocks, EngineSpec, Group, IntegrityOptions, ReleaseOutcome
from kvferry.aio import AsyncSession
from kvferry.errors import KvferryError
from tests.api.conftest import AXES, BLOCKS, TOKENS, array
from tests.support.identifiers import unique_id

GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)


async def test_two_engines_on_one_loop(node: str) -> None:
    theirs, mine = array(), array()
    theirs[:] = 7
    async with AsyncClient(node, integrity=IntegrityOptions("full", patience=20.0)) as client:
        spec = EngineSpec(unique_id("source"), (GROUP,))
        source = await client.register_cache(spec, tensors={"l": theirs}, axes=AXES)
        reader = await client.register_cache(
            EngineSpec(unique_id("reader"), (GROUP,)), tensors={"l": mine}, axes=AXES, labels={"tp_rank": 0}
        )
        session = AsyncSession(source.session)
        assert session.spec == spec
        assert await asyncio.wrap_future(reader.warm(source.engine_reference)) == (0,)
        assert session.engine_reference == source.engine_reference
        assert session.token.engine_id == spec.engine_id

        first = {"full": Blocks([3])}
        publication = await session.publish("request", first, last=False, checksums=True)
        rest = {"full": Blocks([4], first_token=TOKENS)}
        await session.publish_more(publication, rest, last=True, payload=b"token")
        assert await asyncio.wrap_future(source.checksum(publication.number, first, last=False)) > 0
        assert await asyncio.wrap_future(source.checksum(publication.number, rest)) > 0
        assert await session.unreleased() == (publication,)
        result = await reader.read(publication.reference, {"full": Blocks([1, 2])})
        assert (result.payload, result.confirmed) == (b"token", True)
        assert result.verification is not None
        assert (mine[:, 1:3] == 7).all()
        assert reader.gauges().bytes_moved >= result.bytes
        (release,) = await session.released(timeout=20.0)
        assert release.outcome is ReleaseOutcome.READ
        assert str(release) == (
            f"publication 1 of request 'request': READ; valid by '{reader.spec.engine_id}' "
            f"(1 of 1 ranks, {result.bytes} bytes)"
        )

        declined = await session.publish("declined", {"full": Blocks([5])})
        await client.decline(declined.reference, timeout=10.0)
        aborted = await session.publish("aborted", {"full": Blocks([6])}, last=False)
        await session.abort(aborted)
        found = [*await session.released(timeout=20.0)]
        while len(found) < 2:
            found += await session.released(timeout=20.0)
        outcomes = {each.request_id: each.outcome for each in found}
        assert outcomes == {"declined": ReleaseOutcome.DECLINED, "aborted": ReleaseOutcome.ABORTED}

        opened = await client.open_engine(EngineSpec(unique_id("other"), (GROUP,)), timeout=20.0)
        await opened.close()
    with pytest.raises(KvferryError):
        reader.prepare()


async def test_a_warm_up_that_nobody_waits_for_ends_in_silence(node: str, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient(node) as client:
        tensors = {"l": array()}
        source = await client.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors=tensors, axes=AXES)
        reader = await client.register_cache(EngineSpec(unique_id("reader"), (GROUP,)), tensors=tensors, axes=AXES)
        warming = asyncio.wrap_future(reader.warm(source.engine_reference))
        await asyncio.sleep(0)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        # The next one is not affected.
        assert await asyncio.wrap_future(reader.warm(source.engine_reference)) == (0,)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
