"""The asyncio client from an engine's start to its end: everything that the synchronous one does."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvferry import AsyncClient, Blocks, EngineSpec, Group, IntegrityOptions, ReleaseOutcome
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
        assert (source.spec, source.rank.rank, source.session.spec) == (spec, 0, spec)
        assert source.reuse_after >= 0.0
        reader.prepare()
        assert await reader.warm(source.engine_reference) == (0,)
        assert source.engine_reference == source.session.engine_reference
        assert source.session.token.engine_id == spec.engine_id

        first = {"full": Blocks([3])}
        publication = await source.session.publish("request", first, last=False, checksums=True)
        rest = {"full": Blocks([4], first_token=TOKENS)}
        await source.session.publish_more(publication, rest, last=True, payload=b"token")
        assert await source.checksum(publication.number, first, last=False) > 0
        assert await source.checksum(publication.number, rest) > 0
        assert await source.session.unreleased() == (publication,)
        result = await reader.read(publication.reference, {"full": Blocks([1, 2])})
        assert (result.payload, result.confirmed) == (b"token", True)
        assert result.verification is not None
        assert (mine[:, 1:3] == 7).all()
        assert reader.gauges().bytes_moved >= result.bytes
        (release,) = await source.session.released(timeout=20.0)
        assert release.outcome is ReleaseOutcome.READ
        assert str(release) == (
            f"publication 1 of request 'request': READ; valid by '{reader.spec.engine_id}' "
            f"(1 of 1 ranks, {result.bytes} bytes)"
        )

        declined = await source.session.publish("declined", {"full": Blocks([5])})
        await client.decline(declined.reference, timeout=10.0)
        aborted = await source.session.publish("aborted", {"full": Blocks([6])}, last=False)
        await source.session.abort(aborted)
        found = [*await source.session.released(timeout=20.0)]
        while len(found) < 2:
            found += await source.session.released(timeout=20.0)
        outcomes = {each.request_id: each.outcome for each in found}
        assert outcomes == {"declined": ReleaseOutcome.DECLINED, "aborted": ReleaseOutcome.ABORTED}

        opened = await client.open_engine(EngineSpec(unique_id("other"), (GROUP,)), timeout=20.0)
        await opened.close()
        await reader.close(timeout=5.0)
        with pytest.raises(KvferryError):
            reader.prepare()


async def test_a_warm_up_that_nobody_waits_for_ends_in_silence(node: str, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient(node) as client:
        tensors = {"l": array()}
        source = await client.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors=tensors, axes=AXES)
        reader = await client.register_cache(EngineSpec(unique_id("reader"), (GROUP,)), tensors=tensors, axes=AXES)
        warming = asyncio.ensure_future(reader.warm(source.engine_reference))
        await asyncio.sleep(0)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        # It goes on, and the next one finds what it has made.
        assert await reader.warm(source.engine_reference) == (0,)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
