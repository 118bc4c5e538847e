"""Introspection over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvferry.clock import from_duration
from kvferry.codec import engine_to_proto
from kvferry.errors import EngineUnknown, Incompatible, InvalidField, KvferryError
from kvferry.geometry import EngineGeometry
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.server.node import TIMEOUT, Node, proto, raised, read_done, running
from tests.server.parties import FULL, TIMES, D, P, rank_geometry, start


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


def engine(name: str, ranks: int, heads: int = 8) -> EngineGeometry:
    ranks_held = tuple(rank_geometry(rank, ranks, heads=heads) for rank in range(ranks))
    return EngineGeometry(name, (FULL,), ranks_held, {"model": "m"})


async def test_engines_are_listed_with_their_state_page_by_page(node: Node) -> None:
    for name in ("c", "a", "b"):
        await node.open_engine(start(name, name))
    await node.register(0, 2, ref=start("b", "b"))
    names, token = [], ""
    for _ in range(2):
        request = ipb.ListEnginesRequest(page_size=2, page_token=token)
        answer = await node.introspection.ListEngines(request, timeout=TIMEOUT)
        names += [summary.engine.engine_id for summary in answer.engines]
        token = answer.next_page_token
    assert names == ["a", "b", "c"]
    assert not token
    answer = await node.introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT)
    summary = answer.engines[1]
    assert (summary.state, summary.num_ranks, list(summary.missing_ranks)) == (ipb.ENGINE_STATE_INCOMPLETE, 2, [1])
    assert summary.cache_bytes == 4 * 4 * 16 * 256 * FULL.num_blocks
    assert answer.home_epoch == node.home.epoch


async def test_an_engine_is_shown_with_what_it_registered(node: Node) -> None:
    watch = await node.open_engine()
    request = ipb.GetEngineRequest(engine_id=P.engine_id)
    empty = await node.introspection.GetEngine(request, timeout=TIMEOUT)
    assert empty.summary.state == ipb.ENGINE_STATE_INCOMPLETE
    assert empty.geometry.incarnation == P.incarnation
    await node.register()
    await node.publish()
    await node.read().next()
    found = await node.introspection.GetEngine(request, timeout=TIMEOUT)
    assert found.summary.state == ipb.ENGINE_STATE_READY
    assert (found.summary.publications, found.summary.leases) == (1, 1)
    assert len(found.geometry.ranks[0].planes) == 4
    watch.cancel()
    error = await raised(node.introspection.GetEngine(ipb.GetEngineRequest(engine_id="x"), timeout=TIMEOUT))
    assert isinstance(error, EngineUnknown)


async def test_requests_are_listed_until_their_release_is_acknowledged(node: Node) -> None:
    await node.open_engine()
    await node.register()
    await node.publish(2, last=False)
    await node.publish(1, expected_reads=2)
    stream = node.read(1)
    await stream.next()
    node.pass_by(7)
    answer = await node.introspection.ListRequests(ipb.ListRequestsRequest(engine_id=P.engine_id), timeout=TIMEOUT)
    one, two = answer.requests
    assert (one.publication, one.request_id, one.state) == (1, "r1", ipb.REQUEST_STATE_PUBLISHED)
    assert (one.blocks, one.leases, one.reads_valid, one.expected_reads) == (4, 1, 0, 2)
    assert from_duration(one.age) == 7
    assert two.state == ipb.REQUEST_STATE_PUBLISHING
    await node.source(pb.Notification(abort=pb.Abort(publication=1)), pb.Notification(abort=pb.Abort(publication=2)))
    answer = await node.introspection.ListRequests(ipb.ListRequestsRequest(), timeout=TIMEOUT)
    states = [request.state for request in answer.requests]
    assert states == [ipb.REQUEST_STATE_ENDING, ipb.REQUEST_STATE_RELEASED]
    await node.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[2])))
    answer = await node.introspection.ListRequests(ipb.ListRequestsRequest(), timeout=TIMEOUT)
    assert [request.publication for request in answer.requests] == [1]
    other = await node.introspection.ListRequests(ipb.ListRequestsRequest(engine_id="other"), timeout=TIMEOUT)
    assert not other.requests


async def test_transfers_are_listed_as_long_as_their_outcome_is_kept(node: Node) -> None:
    await node.open_engine()
    await node.register()
    await node.publish(1, expected_reads=2)
    stream = node.read(1)
    lease_id = (await stream.next()).accepted.lease_id
    request = ipb.ListTransfersRequest()
    [live] = (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers
    assert (live.source, live.publication, live.request_id) == (proto(P), 1, "r1")
    assert (live.read.reader, live.read.state) == (proto(D), pb.READ_STATE_READING)
    assert from_duration(live.lease_remaining) == TIMES.ttl
    await node.reader(read_done(lease_id, 0))
    [ended] = (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers
    assert (ended.read.state, from_duration(ended.lease_remaining)) == (pb.READ_STATE_VALID, 0)
    node.pass_by(TIMES.outcomes)
    assert not (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers


@pytest.mark.parametrize(("size", "token"), [(1001, ""), (0, "?"), (0, "a"), (0, "x" * 5000), (0, "é")])
async def test_pages_that_cannot_be(node: Node, size: int, token: str) -> None:
    request = ipb.ListRequestsRequest(page_size=size, page_token=token)
    assert isinstance(await raised(node.introspection.ListRequests(request, timeout=TIMEOUT)), InvalidField)


async def test_a_read_is_planned_between_an_engine_and_a_geometry(node: Node) -> None:
    await node.open_engine()
    for rank in range(2):
        await node.register(rank, 2)
    request = ipb.PlanReadRequest(
        source_engine_id=P.engine_id, destination_geometry=engine_to_proto(engine("d", 4)), ranks=[3, 1, 1]
    )
    answer = await node.introspection.PlanRead(request, timeout=TIMEOUT)
    assert [plan.rank for plan in answer.ranks] == [1, 3]
    assert [{read.source_rank for read in plan.reads} for plan in answer.ranks] == [{0}, {1}]
    del request.ranks[:]
    answer = await node.introspection.PlanRead(request, timeout=TIMEOUT)
    assert [plan.rank for plan in answer.ranks] == [0, 1, 2, 3]


async def test_plans_that_cannot_be(node: Node) -> None:
    two, nine = engine_to_proto(engine("s", 2)), engine_to_proto(engine("d", 1, heads=9))
    other = ipb.PlanReadRequest(source_geometry=two, destination_engine_id="nobody")
    cases: list[tuple[ipb.PlanReadRequest, type[KvferryError]]] = [
        (ipb.PlanReadRequest(), InvalidField),
        (ipb.PlanReadRequest(source_geometry=two), InvalidField),
        (other, EngineUnknown),
        (ipb.PlanReadRequest(source_geometry=two, destination_geometry=two, ranks=[7]), InvalidField),
        (ipb.PlanReadRequest(source_geometry=two, destination_geometry=nine), Incompatible),
    ]
    for request, expected in cases:
        assert isinstance(await raised(node.introspection.PlanRead(request, timeout=TIMEOUT)), expected), request
