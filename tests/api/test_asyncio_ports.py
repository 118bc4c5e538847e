"""What asyncio programs wait for: releases, quiet blocks, and the news of an engine's ports."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvferry import AsyncClient, Blocks, Cache, EngineSession, EngineSpec, Group, SchedulerPort, WorkerPort
from kvferry.aio import AsyncSchedulerPort, AsyncSession
from kvferry.errors import Closed, TransferCancelled, WrongState
from kvferry.testing import Fabric
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SOON = 20.0


def spec(name: str) -> EngineSpec:
    return EngineSpec(name, (Group("full", block_tokens=16, num_blocks=8),))


def memory(value: float) -> Any:
    return np.full((2, 8, 1, 16, 4), value, np.float32)


def test_releases_are_yielded_as_they_come_until_the_session_is_closed() -> None:
    async def main(fabric: Fabric) -> list[str]:
        found: list[str] = []
        async with AsyncClient(fabric.address) as source, AsyncClient(fabric.address) as reader:
            prefill = await source.register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
            decode = await reader.register_cache(spec("d"), tensors={"layer": memory(0)}, axes=AXES)

            async def collect() -> None:
                async for release in prefill.session.releases():
                    found.append(release.request_id)
                    if len(found) == 2:
                        await prefill.session.close()

            collecting = asyncio.create_task(collect())
            for name in ("one", "two"):
                publication = await prefill.session.publish(name, {"full": Blocks([1])})
                await decode.read(publication.reference, {"full": Blocks([2])})
            await asyncio.wait_for(collecting, SOON)
        return found

    with Fabric() as fabric:
        assert asyncio.run(main(fabric)) == ["one", "two"]


def test_a_cancelled_wait_for_releases_loses_none() -> None:
    async def main(fabric: Fabric) -> list[str]:
        async with AsyncClient(fabric.address) as source:
            prefill = await source.register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
            waiting = asyncio.create_task(prefill.session.released(timeout=SOON))
            publication = await prefill.session.publish("mine", {"full": Blocks([1])})
            waiting.cancel()
            await prefill.session.abort(publication)
            await asyncio.to_thread(until, lambda: not prefill.sync.session.unreleased())
            return [release.request_id for release in await prefill.session.released()]

    with Fabric() as fabric:
        assert asyncio.run(main(fabric)) == ["mine"]


def test_who_leaves_the_iteration_of_releases_finds_the_others_later() -> None:
    async def main(fabric: Fabric) -> list[str]:
        async with AsyncClient(fabric.address) as source:
            prefill = await source.register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
            for name in ("one", "two"):
                await prefill.session.abort(await prefill.session.publish(name, {"full": Blocks([1])}))
            await asyncio.to_thread(until, lambda: not prefill.sync.session.unreleased())
            found: list[str] = []
            async for release in prefill.session.releases():
                found.append(release.request_id)
                break
            return found + [left.request_id for left in await prefill.session.released()]

    with Fabric() as fabric:
        assert asyncio.run(main(fabric)) == ["one", "two"]


def test_a_cancelled_read_is_awaited_until_nothing_writes_to_its_blocks() -> None:
    async def main(fabric: Fabric) -> None:
        source, reader = fabric.client(), fabric.client()
        prefill = source.register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
        decode = reader.register_cache(spec("d"), tensors={"layer": memory(0)}, axes=AXES)
        publication = await asyncio.to_thread(prefill.session.publish, "mine", {"full": Blocks([1])})
        with fabric.hold_reads() as held:
            read = decode.read(publication.reference, {"full": Blocks([2])})
            await asyncio.to_thread(held.wait)
            read.cancel()
            quiet = asyncio.create_task(read.until_quiet())
            with pytest.raises(TransferCancelled):
                await read
            assert not quiet.done()
            assert not read.quiet
        await asyncio.wait_for(quiet, SOON)
        assert read.quiet

    with Fabric() as fabric:
        asyncio.run(main(fabric))


def test_an_engine_without_ports_is_quiet_when_each_read_is() -> None:
    """The gauges of its cache know of no read that waits, and that writes as soon as its source has published."""
    with Fabric() as fabric:
        prefill = fabric.client().register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
        mine = memory(0)
        decode = fabric.client().register_cache(spec("d"), tensors={"layer": mine}, axes=AXES)
        publication = prefill.session.publish("mine", {"full": Blocks([1])}, last=False)
        read = decode.read(publication.reference, {"full": Blocks([2, 3])})
        with pytest.raises(TimeoutError):
            read.result(0.2)
        gauges = decode.gauges()
        assert (gauges.transfers, gauges.uncertain, decode.session.unreleased()) == (0, 0, ())
        assert not read.quiet
        prefill.session.publish_more(publication, {"full": Blocks([4], first_token=16)}, last=True)
        read.result(SOON)
        assert read.quiet
        assert mine[:, 2:4].all()


def test_caches_and_sessions_in_asyncio_are_closed_at_the_end_of_their_block() -> None:
    async def main(fabric: Fabric) -> None:
        async with AsyncClient(fabric.address) as client:
            async with await client.open_engine(spec("p")) as session:
                assert await session.unreleased() == ()
            with pytest.raises(Closed):
                await session.publish("late", {"full": Blocks([1])})
            async with await client.register_cache(spec("d"), tensors={"layer": memory(0)}, axes=AXES) as cache:
                cache.prepare()
            with pytest.raises(Closed):
                cache.prepare()

    with Fabric() as fabric:
        asyncio.run(main(fabric))


def test_a_scheduler_in_asyncio_waits_for_its_news() -> None:
    async def main(fabric: Fabric) -> float:
        mine = memory(0)
        async with AsyncClient(fabric.address) as source, AsyncClient(fabric.address) as client:
            prefill = await source.register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)
            async with await AsyncSchedulerPort.open(client, spec("d")) as port:
                worker = WorkerPort(client.sync, port.spec)
                await asyncio.to_thread(worker.register, {"layer": mine}, axes=AXES)
                publication = await prefill.session.publish("mine", {"full": Blocks([1])})
                port.acquire("mine", publication.reference)
                while port.granted("mine") is None:
                    assert await port.until_news(SOON)
                worker.start(port.attach("mine", {"full": Blocks([2])}))
                while not (ended := port.finished().reads):
                    port.collect(worker.finished())
                    await asyncio.wait(
                        [asyncio.ensure_future(each.until_news(SOON)) for each in (port, worker)],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                assert ended[0].error is None
                assert not await port.until_news(0.0)
        return float(mine[0, 2, 0, 0, 0])

    with Fabric() as fabric:
        assert asyncio.run(main(fabric)) == 7


@pytest.mark.parametrize("port", [False, True], ids=["session", "port"])
def test_an_opening_that_is_cancelled_leaves_no_engine_open(port: bool) -> None:
    async def main(fabric: Fabric) -> None:
        async with AsyncClient(fabric.address) as client:

            async def opened() -> AsyncSession | AsyncSchedulerPort:
                if port:
                    return await AsyncSchedulerPort.open(client, spec("d"), timeout=SOON)
                return await client.open_engine(spec("d"), timeout=SOON)

            with fabric.client().open_engine(spec("d")):
                opening = asyncio.create_task(opened())
                # Its thread waits for the other start of the engine.
                await asyncio.to_thread(until, lambda: bool(client.sync.stats().calls.failed))
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
            await asyncio.to_thread(until, lambda: len(client.sync._sessions) == 1)
            async with await opened():
                pass

    with Fabric(engine_ttl=0.5) as fabric:
        # Until then a home cannot tell which start of an engine is the older.
        fabric.advance(1.0)
        asyncio.run(main(fabric))


def test_an_opening_that_the_end_of_the_program_cancels_leaves_no_engine_open() -> None:
    """As control-C does: `asyncio.run` cancels all tasks, also those that nobody has seen."""
    with Fabric(engine_ttl=0.5) as fabric:
        # Until then a home cannot tell which start of an engine is the older.
        fabric.advance(1.0)
        before = fabric.client().open_engine(spec("d"))
        client = AsyncClient(fabric.address)

        async def end_the_other_start() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                before.close()

        async def main() -> None:
            tasks.append(asyncio.create_task(client.open_engine(spec("d"), timeout=SOON)))
            tasks.append(asyncio.create_task(end_the_other_start()))
            await asyncio.to_thread(until, lambda: bool(client.sync.stats().calls.failed))

        tasks = list[asyncio.Task[Any]]()
        asyncio.run(main())
        assert tasks[0].cancelled()
        fabric.client().open_engine(spec("d"), timeout=SOON).close()
        client.sync.close()


def test_ports_sessions_and_caches_close_at_the_end_of_a_with_block() -> None:
    with Fabric() as fabric:
        client = fabric.client()
        with SchedulerPort(client, spec("d")) as port, WorkerPort(client, port.spec) as worker:
            worker.register({"layer": memory(0)}, axes=AXES)
        with pytest.raises(WrongState):
            port.granted("mine")
        with client.open_engine(spec("e")) as session:
            assert isinstance(session, EngineSession)
        with client.register_cache(spec("f"), tensors={"layer": memory(0)}, axes=AXES) as cache:
            assert isinstance(cache, Cache)
