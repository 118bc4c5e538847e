"""Introspection over a real server."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry._clock import from_duration
from kvferry._wire.geometry_codec import engine_to_proto
from kvferry.errors import (
    EngineIncomplete,
    EngineUnknown,
    Incompatible,
    InvalidField,
    KvferryError,
    PeerRestarted,
)
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.planner.plan import ReadPlan, plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_RANK_BYTES
from kvferry_server.servicers import introspection, limits
from kvferry_server.servicers.callers import Context
from tests.server.servicers.registrations import of_size
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    Watch,
    proto,
    raised,
    read_done,
    running,
    snapshot,
)
from tests.support.parties import FULL, P2, TIMES, D, E, P, rank_geometry, read_id, start


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


async def test_lists_say_while_engines_or_their_snapshots_are_awaited(tmp_path: Path) -> None:
    """An empty list would look like an answer."""

    async def recovering(of: str = "") -> tuple[bool, bool, bool]:
        engines = await node.introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT)
        requests = await node.introspection.ListRequests(ipb.ListRequestsRequest(engine_id=of), timeout=TIMEOUT)
        transfers = await node.introspection.ListTransfers(ipb.ListTransfersRequest(engine_id=of), timeout=TIMEOUT)
        return engines.recovering, requests.recovering, transfers.recovering

    async with running(tmp_path, new=True) as node:
        assert await recovering() == (True, True, True)
        await node.open_engine()
        # Others may still come back.
        assert await recovering(P.engine_id) == (True, True, True)
        node.pass_by(TIMES.engine_ttl)
        assert await recovering() == (False, False, False)
        watch = Watch(node, E)
        assert await watch.kinds(2) == ["opened", "synced"]
        assert await recovering() == (False, True, True)
        assert await recovering(E.engine_id) == (False, True, True)
        assert await recovering(P.engine_id) == (False, False, False)
        await node.source(*snapshot(), ref=E)
        assert await recovering() == (False, False, False)
        # It dies before its snapshot: nobody waits for that any more.
        dying = Watch(node, D)
        assert await dying.kinds(2) == ["opened", "synced"]
        await node.leaves(dying)
        assert await recovering() == (False, True, True)
        node.pass_by(TIMES.engine_ttl)
        assert await recovering() == (False, False, False)


async def test_a_page_of_engines_with_thousands_of_missing_ranks_is_bounded(node: Node) -> None:
    for index in range(120):
        ref = start(f"{index:03}" + "e" * 250, chr(index + 1))
        await node.open_engine(ref)
        await node.register(7, 4096, ref=ref, geometry=rank_geometry(7, 8))
    names, token = [], "first"
    request = ipb.ListEnginesRequest(page_size=1000)
    while token:
        answer = await node.introspection.ListEngines(request, timeout=TIMEOUT)
        assert answer.ByteSize() < 300_000
        assert {summary.num_missing for summary in answer.engines} == {4095}
        assert list(answer.engines[0].missing_ranks) == [rank for rank in range(65) if rank != 7]
        names += [summary.engine.engine_id[:3] for summary in answer.engines]
        token = request.page_token = answer.next_page_token
    assert names == [f"{index:03}" for index in range(120)]


async def test_missing_ranks_are_named_as_far_as_they_fit(node: Node) -> None:
    await node.open_engine()
    answer = await node.register(7, 4096, geometry=rank_geometry(7, 8))
    assert (answer.num_missing, len(answer.missing_ranks)) == (4095, 64)
    error = await raised(node.handshake())
    assert isinstance(error, EngineIncomplete)
    assert error.values["missing"] == "4095"
    assert error.values["missing_ranks"].startswith("0,1,2,3,4,5,6,8,")
    assert len(str(error)) < 600


async def test_transfers_of_thousands_of_ranks_come_in_pages_that_fit(node: Node) -> None:
    await node.open_engine()
    await node.register()
    await node.publish(1, expected_reads=100)
    reads = []
    for index in range(40):
        accepted = (await node.read(1, read_id=read_id(str(index)), parties=4096)).accepted
        reads.append(accepted.lease_number)
        lease_id = accepted.lease_id
        await node.reader(read_done(lease_id, *range(4000)))
    found, pages, token = [], 0, "first"
    request = ipb.ListTransfersRequest(page_size=1000)
    while token:
        answer = await node.introspection.ListTransfers(request, timeout=TIMEOUT)
        found += [transfer.read.lease_number for transfer in answer.transfers]
        assert answer.ByteSize() < 400_000
        pages += 1
        token = request.page_token = answer.next_page_token
    assert found == reads
    assert pages > 1


async def test_an_engine_of_large_ranks_comes_page_by_page(node: Node) -> None:
    await node.open_engine()
    sizes = [1 << 20, MAX_RANK_BYTES, 2 << 20, 1 << 20, 5000, 5000, (1 << 20) - 5000]
    registered = [of_size(size, rank, len(sizes)) for rank, size in enumerate(sizes)]
    for registration in registered:
        await node.kv.RegisterCache(registration, timeout=TIMEOUT)
    for page_size in (0, 2):
        request = ipb.GetEngineRequest(engine_id=P.engine_id, page_size=page_size)
        ranks: list[geometry_pb2.RankGeometry] = []
        counts: list[int] = []
        while not counts or request.page_token:
            answer = await node.introspection.GetEngine(request, timeout=TIMEOUT)
            assert answer.geometry.identity["model"] == "m"
            assert answer.geometry.groups
            ranks += answer.geometry.ranks
            counts.append(len(answer.geometry.ranks))
            request.page_token = answer.next_page_token
        assert ranks == [registration.rank for registration in registered]
        assert max(counts) <= (page_size or 1000)
        assert len(counts) > 2
    wrong = ipb.GetEngineRequest(engine_id=P.engine_id, page_token="YQ")
    assert isinstance(await raised(node.introspection.GetEngine(wrong, timeout=TIMEOUT)), InvalidField)


async def test_pages_of_an_engine_that_restarted_are_not_mixed(node: Node) -> None:
    watch = await node.open_engine()
    for rank in range(2):
        await node.register(rank, 2)
    request = ipb.GetEngineRequest(engine_id=P.engine_id, page_size=1)
    request.page_token = (await node.introspection.GetEngine(request, timeout=TIMEOUT)).next_page_token
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    assert isinstance(await raised(node.introspection.GetEngine(request, timeout=TIMEOUT)), PeerRestarted)


async def test_engine_is_shown_with_its_registration(node: Node) -> None:
    watch = await node.open_engine()
    request = ipb.GetEngineRequest(engine_id=P.engine_id)
    empty = await node.introspection.GetEngine(request, timeout=TIMEOUT)
    assert empty.summary.state == ipb.ENGINE_STATE_INCOMPLETE
    assert empty.geometry.incarnation == P.incarnation
    await node.register()
    await node.publish()
    await node.read()
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
    await node.read(1)
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


async def test_a_read_that_waits_shows_how_many_parts_there_are(node: Node) -> None:
    await node.open_engine()
    await node.register()
    await node.publish(1, last=False)
    await node.read(1)
    shown = []
    for step in (1, 2):
        [read] = (await node.introspection.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT)).transfers
        shown.append((read.read.state, read.parts))
        await node.publish(1, step=step, last=step == 2)
    [read] = (await node.introspection.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT)).transfers
    assert shown == [(pb.READ_STATE_WAITING, 1), (pb.READ_STATE_WAITING, 2)]
    assert (read.read.state, read.parts) == (pb.READ_STATE_READING, 0)


async def test_transfers_are_listed_as_long_as_their_outcome_is_kept(node: Node) -> None:
    await node.open_engine()
    await node.register()
    await node.publish(1, expected_reads=2)
    lease_id = (await node.read(1)).accepted.lease_id
    request = ipb.ListTransfersRequest()
    [live] = (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers
    assert (live.source, live.publication, live.request_id) == (proto(P), 1, "r1")
    assert (live.read.reader, live.read.state) == (proto(D), pb.READ_STATE_READING)
    assert from_duration(live.lease_remaining) == TIMES.ttl
    await node.reader(read_done(lease_id, 0))
    [ended] = (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers
    assert (ended.read.state, from_duration(ended.lease_remaining)) == (pb.READ_STATE_VALID, 0)
    node.pass_by(TIMES.keep_outcome)
    assert not (await node.introspection.ListTransfers(request, timeout=TIMEOUT)).transfers


@pytest.mark.parametrize(("size", "token"), [(1001, ""), (0, "?"), (0, "a"), (0, "x" * 5000), (0, "é")])
async def test_pages_with_invalid_sizes_or_tokens_are_refused(node: Node, size: int, token: str) -> None:
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


async def test_plan_that_does_not_fit_one_answer_names_the_ranks_left_out(node: Node) -> None:
    def renamed(rank: RankGeometry) -> RankGeometry:
        """With two hundred layers of long names, over the same memory."""
        (key, *_), size = rank.planes, 1 << 30
        names = [f"{layer:03}" + "x" * 250 for layer in range(200)]
        planes = [replace(key, layer=name, base=key.base + index * size) for index, name in enumerate(names)]
        return replace(rank, planes=tuple(planes))

    source = engine("s", 8)
    whole = renamed(rank_geometry())
    readers = tuple(replace(whole, rank=rank) for rank in range(16))
    request = ipb.PlanReadRequest(
        source_geometry=engine_to_proto(replace(source, ranks=tuple(map(renamed, source.ranks)))),
        destination_geometry=engine_to_proto(replace(source, engine_id="d", ranks=readers)),
    )
    planned: list[int] = []
    answers = 0
    while not answers or request.ranks:
        answer = await node.introspection.PlanRead(request, timeout=TIMEOUT)
        assert answer.ByteSize() <= 3 << 20
        planned += [plan.rank for plan in answer.ranks]
        assert all(len(plan.reads) == 8 for plan in answer.ranks)
        request.ranks[:] = answer.left_ranks
        answers += 1
    assert planned == list(range(16))
    assert answers > 1


async def test_plans_that_are_impossible_are_refused(node: Node) -> None:
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


async def test_hosts_take_turns_on_plans(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, planned, go_on = list[str](), list[str](), threading.Event()

    def host_of(context: Context) -> str:
        asked.append(str(dict(context.invocation_metadata() or ())["host"]))
        return asked[-1]

    def plan(source: EngineGeometry, destination: EngineGeometry, rank: int) -> ReadPlan:
        go_on.wait(TIMEOUT)
        planned.append(destination.engine_id)
        return plan_read(source, destination, rank)

    monkeypatch.setattr(introspection, "remote_host", host_of)
    monkeypatch.setattr(introspection, "plan_read", plan)
    source, calls = engine_to_proto(engine("s", 1)), list[Any]()
    for host in ("greedy", "greedy", "greedy", "other"):
        request = ipb.PlanReadRequest(source_geometry=source, destination_geometry=engine_to_proto(engine(host, 1)))
        calls.append(node.introspection.PlanRead(request, timeout=TIMEOUT, metadata=(("host", host),)))
        while len(asked) < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    go_on.set()
    for call in calls:
        await call
    assert planned == ["greedy", "greedy", "other", "greedy"]


async def test_server_info_has_identity_limits_and_capabilities(node: Node) -> None:
    node.pass_by(5)
    answer = await node.introspection.GetServerInfo(ipb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert (answer.home_epoch, answer.version, answer.advertise) == (node.home.epoch, kvferry.__version__, ADVERTISE)
    assert from_duration(answer.uptime) == pytest.approx(1005)
    assert from_duration(answer.times.ttl) == TIMES.ttl
    assert not answer.draining
    assert answer.contract_revision >= 1
    # The names are those in errors and in requests.
    assert answer.limits["leases"] == node.home.limits.leases
    assert answer.limits["notifications"] == 1024
    assert answer.limits["message_bytes"] == 4 << 20
    assert {"admin", "decline_forwarding", "list_filters"} <= set(answer.capabilities)


async def listed(node: Node, request: ipb.ListRequestsRequest | ipb.ListTransfersRequest) -> tuple[list[str], int]:
    """Return the entries of all pages, as "engine request reader", and the number of pages."""
    found, pages = list[str](), 0
    while not pages or request.page_token:
        pages += 1
        if isinstance(request, ipb.ListRequestsRequest):
            requests = await node.introspection.ListRequests(request, timeout=TIMEOUT)
            found += [f"{one.engine.engine_id} {one.request_id}" for one in requests.requests]
            request.page_token = requests.next_page_token
        else:
            transfers = await node.introspection.ListTransfers(request, timeout=TIMEOUT)
            found += [f"{one.request_id} {one.read.reader.engine_id}" for one in transfers.transfers]
            request.page_token = transfers.next_page_token
    return found, pages


async def test_listings_are_filtered_by_request_and_by_reader(ready: Node) -> None:
    for number in (1, 2, 3):
        await ready.publish(number, request_id=f"r{(number + 1) // 2}", expected_reads=9)
    for number, reader in ((1, D), (2, E), (3, D), (3, E)):
        await ready.read(number, reader=reader, read_id=read_id(reader.engine_id))
    name = "other-decode"
    assert E.engine_id == name
    for page_size in (1, 1000):
        size = {"page_size": page_size}
        for filters, entries in (
            ({"request_id": "r1"}, ["prefill r1", "prefill r1"]),
            ({"reader_engine_id": name}, ["prefill r1", "prefill r2"]),
            ({"reader_engine_id": name, "request_id": "r1"}, ["prefill r1"]),
            ({"request_id": "r1", "engine_id": "nobody"}, []),
            ({"request_id": "r"}, []),
        ):
            assert (await listed(ready, ipb.ListRequestsRequest(**size, **filters)))[0] == entries  # type: ignore[arg-type]
        for filters, entries in (
            ({"request_id": "r1"}, ["r1 decode", f"r1 {name}"]),
            ({"reader_engine_id": "decode"}, ["r1 decode", "r2 decode"]),
            ({"reader_engine_id": "decode", "request_id": "r2"}, ["r2 decode"]),
            ({"reader_engine_id": "nobody"}, []),
        ):
            assert (await listed(ready, ipb.ListTransfersRequest(**size, **filters)))[0] == entries  # type: ignore[arg-type]
    for field in ("request_id", "reader_engine_id"):
        for request in (ipb.ListRequestsRequest(**{field: "x" * 257}), ipb.ListTransfersRequest(**{field: "x" * 257})):  # type: ignore[arg-type]
            assert isinstance(await raised(listed(ready, request)), InvalidField)


async def test_a_filter_that_finds_little_looks_through_a_bounded_number_for_each_page(
    ready: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LOOKS", 4)
    for number in range(1, 11):
        await ready.publish(number, request_id="wanted" if number in (6, 10) else "x")
    found, pages = await listed(ready, ipb.ListRequestsRequest(request_id="wanted"))
    assert (found, pages) == (["prefill wanted"] * 2, 3)
    assert (await listed(ready, ipb.ListRequestsRequest()))[1] == 1
