"""Messages that a peer can make grow are bounded in bytes: the answer to the largest accepted input arrives."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry._arguments import label
from kvferry._wire.authority import incarnation_of
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry._wire.status import NOTIFICATION_ERROR_BYTES, from_rpc_error
from kvferry.errors import BadReference, InvalidField, KvferryError, LimitReached, PeerRestarted
from kvferry.geometry import RankGeometry
from kvferry.planner.checksum import places_of
from kvferry.v1 import errors_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Process, Role
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.steps import PAGE_OVERHEAD
from kvferry_server.domain.values import EngineRef
from kvferry_server.home import time_slices
from kvferry_server.servicers import checksums, limits
from kvferry_server.servicers.introspection import page
from kvferry_server.servicers.limits import MAX_GROUPS, MAX_NOTIFICATIONS, MAX_RELEASED_READS, MAX_RUNS
from tests.support.examples import examples
from tests.support.node_in_process import (
    TIMEOUT,
    Node,
    Stream,
    Watch,
    handshake_request,
    proto,
    publish_notification,
    raised,
    read_done,
    reference,
    register_request,
    running,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, arrived, rank_geometry, read_id, start
from tests.support.stubs import KVTransferStub

LONGEST = "\N{PILE OF POO}" * 64
"""256 bytes; three times as many where a header's bytes are written in hexadecimal."""

STRANGER = start(LONGEST, "?")

SCATTERED = pb.GroupBlocks(
    group="full",
    end_token=16 * MAX_RUNS,
    run_starts=[1 + 2 * (index % 499) for index in range(MAX_RUNS)],
    run_counts=[1] * MAX_RUNS,
)
"""As many runs as a step may have."""


async def ready(node: Node) -> Watch:
    watch = await node.open_engine()
    await node.register()
    return watch


async def test_largest_step_and_payload_reach_a_reader(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        marks = [pb.PromptMark(end=2**64 - end, digest=b"d" * 16) for end in range(1, limits.MAX_MARKS + 1)]
        answer = await node.publish(1, groups=[SCATTERED], marks=marks, payload=b"x" * 65536)
        assert answer.WhichOneof("kind") == "published", answer
        told = await node.read(1)
        assert told.accepted.lease_id
        [blocks] = told.blocks
        assert list(blocks.groups[0].run_starts) == list(SCATTERED.run_starts)
        assert list(blocks.marks) == marks
        assert len(told.complete.payload) == 65536


@pytest.mark.parametrize("beyond", ["runs", "groups", "payload", "expected_reads", "marks"])
async def test_a_step_beyond_a_limit_is_refused_and_changes_nothing(tmp_path: Path, beyond: str) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        more = pb.GroupBlocks()
        more.CopyFrom(SCATTERED)
        more.run_starts.append(1)
        more.run_counts.append(1)
        changes: dict[str, dict[str, Any]] = {
            "runs": {"groups": [more]},
            "groups": {"groups": [pb.GroupBlocks(group=f"g{index}") for index in range(MAX_GROUPS + 1)]},
            "payload": {"payload": b"x" * 65537},
            "expected_reads": {"expected_reads": Limits().reads + 1},
            # Counted before any notification is looked at.
            "marks": {"marks": [pb.PromptMark()] * (limits.MAX_MARKS + 1)},
        }
        answer = await node.publish(1, **changes[beyond])
        assert answer.error.metadata["field"] == ("publish.groups" if beyond == "runs" else f"publish.{beyond}")
        assert (await node.publish(1)).WhichOneof("kind") == "published"


def errors() -> dict[str, Callable[[int], pb.Notification]]:
    """Notifications that fail, each with as many of the sender's bytes in the error as possible."""
    stranger = proto(STRANGER)
    name = LONGEST
    return {
        "decline": lambda number: pb.Notification(decline=pb.Decline(reference=reference(number + 1, STRANGER))),
        "wrong key": lambda number: pb.Notification(decline=pb.Decline(reference=reference(1, P, wrong=b"x" * 16))),
        "unknown group": lambda number: publish_notification(number + 1, groups=[pb.GroupBlocks(group=name)]),
        "group twice": lambda number: publish_notification(
            number + 1, groups=[pb.GroupBlocks(group=name[:-1] + chr(0x1F600 + index)) for index in range(MAX_GROUPS)]
        ),
        "request_id": lambda number: publish_notification(number + 1, request_id=name * 4),
        "step": lambda number: publish_notification(number + 1, step=2**32 - 1),
        "number": lambda number: pb.Notification(abort=pb.Abort(publication=0)),
        "plane": lambda number: pb.Notification(
            checksums=pb.PublishChecksums(publication=1, checksums=[pb.Checksums(plane=name, unit_end=2**64 - 1)])
        ),
        "lease": lambda number: pb.Notification(renew=pb.Renew(lease_id=stranger.incarnation)),
    }


@pytest.mark.parametrize("kind", errors())
async def test_a_full_batch_is_answered_whatever_its_errors_repeat(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(1)
        make = errors()[kind]
        # As many bytes as a call holds, less the sender and its secret.
        count = min(MAX_NOTIFICATIONS, (MAX_NOTIFY_BYTES - 1024) // (make(MAX_NOTIFICATIONS).ByteSize() + 5))
        results = await node.source(*(make(number) for number in range(count)))
        assert len(results) == count
        assert {result.WhichOneof("kind") for result in results} == {"error"}
        assert max(result.ByteSize() for result in results) <= NOTIFICATION_ERROR_BYTES


def test_a_full_batch_of_the_largest_errors_fits_a_message() -> None:
    assert MAX_NOTIFICATIONS * (NOTIFICATION_ERROR_BYTES + 6) + 1024 <= MAX_MESSAGE_BYTES


async def test_a_full_batch_of_publications_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        batch = (publish_notification(number, request_id=LONGEST) for number in range(1, MAX_NOTIFICATIONS + 1))
        results = await node.source(*batch)
        assert {result.WhichOneof("kind") for result in results} == {"published"}


@pytest.mark.parametrize(
    "named", [LONGEST, "\x00" * 256, "%" * 256, "\x7f" * 256], ids=["emoji", "nul", "percent", "del"]
)
async def test_error_arrives_whatever_values_it_repeats(tmp_path: Path, named: str) -> None:
    secret = b"!" * 32
    stranger = EngineRef(named, incarnation_of(secret))
    SECRETS[stranger] = secret
    async with running(tmp_path) as node:
        await ready(node)
        who, kv, look = proto(stranger), node.kv, node.introspection
        calls: list[Any] = [
            kv.RegisterCache(register_request(ref=stranger), timeout=TIMEOUT),
            node.handshake(engine_id=named, incarnation=b"", reader=who, reference=""),
            node.read(reference=reference(1, stranger)),
            node.read(reference="kvf1." + named),
            kv.Notify(
                pb.NotifyRequest(sender=who, session_secret=secret, notifications=[publish_notification()]),
                timeout=TIMEOUT,
            ),
            kv.ReadChecksums(pb.ReadChecksumsRequest(reader=who, lease_id=b"x" * 16), timeout=TIMEOUT),
            Watch(node, stranger, role=pb.WATCH_ROLE_RANK).next(),
            look.GetEngine(ipb.GetEngineRequest(engine_id=named), timeout=TIMEOUT),
            look.ListEngines(ipb.ListEnginesRequest(page_token=named * 8), timeout=TIMEOUT),
            look.PlanRead(ipb.PlanReadRequest(source_engine_id=named, destination_engine_id=named), timeout=TIMEOUT),
        ]
        for call in calls:
            error = await raised(call)
            assert error.reason, error
            assert isinstance(error, BadReference) or error.values or error.reason == "LEASE_ENDED", error


async def test_release_lists_valid_reads_first_as_far_as_a_message_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        watch = await ready(node)
        await node.publish(1)
        reads = Limits().reads
        for number in range(reads):
            lease_id = (await node.read(1, reader=STRANGER, read_id=read_id(str(number)), parties=1)).accepted.lease_id
            outcome = pb.RANK_OUTCOME_DONE if number == reads - 1 else pb.RANK_OUTCOME_FAILED
            await node.reader(read_done(lease_id, 0, outcome=outcome), ref=STRANGER)
        released = (await watch.next()).released
        assert len(released.reads) == MAX_RELEASED_READS
        assert released.reads_left_out == reads - MAX_RELEASED_READS
        assert released.reads[0].state == pb.READ_STATE_VALID
        assert released.outcome == pb.RELEASE_OUTCOME_READ


@pytest.mark.slow
async def test_transfers_of_many_ranks_are_listed_in_pages_that_arrive(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(memory=1 << 31)) as node:
        await ready(node)
        await node.publish(1)
        leases, ranks = 60, Limits().ranks
        for number in range(leases):
            lease_id = (await node.read(1, read_id=read_id(str(number)), parties=ranks)).accepted.lease_id
            reports = [
                pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE, bytes=2**64 - 1) for rank in range(ranks - 1)
            ]
            await node.reader(pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports)))
        token, pages = "", []
        while True:
            request = ipb.ListTransfersRequest(page_size=1000, page_token=token)
            answer = await node.introspection.ListTransfers(request, timeout=TIMEOUT)
            pages.append([transfer.read.lease_number for transfer in answer.transfers])
            token = answer.next_page_token
            if not token:
                break
        assert len(pages) > 1
        found = list(itertools.chain.from_iterable(pages))
        assert found == sorted(set(found))
        assert len(found) == leases


@settings(max_examples=examples(50))
@given(
    shelves=st.dictionaries(
        st.sampled_from("abcd"), st.dictionaries(st.integers(0, 2**64 - 1), st.integers(0, 1 << 21), max_size=8)
    ),
    size=st.integers(0, 5),
)
def test_pages_hold_everything_once_in_order_and_none_is_larger_than_a_message(
    shelves: dict[str, dict[int, int]], size: int
) -> None:
    by_ref = {start(name, name): held for name, held in shelves.items()}
    token, found = "", list[int]()
    for _ in range(100):
        entries, token = page(by_ref, lambda length: BytesValue(value=b"x" * length), size, token)
        assert sum(entry.ByteSize() for entry in entries) < MAX_MESSAGE_BYTES
        assert len(entries) <= (size or 100)
        found += [len(entry.value) for entry in entries]
        if not token:
            break
    assert found == [length for name in sorted(shelves) for _, length in sorted(shelves[name].items())]


async def test_sums_that_no_answer_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(1, checksums=True)
        part = pb.Checksums(plane="layers.0/key", unit_end=8, place_starts=[0], place_counts=[4], sums=list(range(32)))
        [answer] = await node.source(
            pb.Notification(checksums=pb.PublishChecksums(publication=1, checksums=[part], last=True))
        )
        assert answer.WhichOneof("kind") == "done", answer
        lease_id = (await node.read(1)).accepted.lease_id
        query = pb.ChecksumQuery(planes=[part.plane], unit_end=8, place_starts=[0], place_counts=[4])
        request = pb.ReadChecksumsRequest(reader=proto(D), lease_id=lease_id, queries=[query])
        assert list((await node.kv.ReadChecksums(request, timeout=TIMEOUT)).checksums[0].sums) == list(range(32))
        monkeypatch.setattr(limits, "MAX_ANSWER_BYTES", 100)
        assert isinstance(await raised(node.kv.ReadChecksums(request, timeout=TIMEOUT)), InvalidField)


async def test_places_asked_for_are_counted_in_queries_without_planes_too(tmp_path: Path) -> None:
    """Each query of twelve bytes would take 4 MiB."""
    query = pb.ChecksumQuery(unit_end=1, place_starts=[0], place_counts=[limits.MAX_ASKED_SUMS])
    async with leased_sums(tmp_path) as ask:
        assert not (await ask([query])).checksums
        assert isinstance(await raised(ask([query] * 2)), InvalidField)


async def test_queries_are_counted_without_planes_too(tmp_path: Path) -> None:
    """As many as fit a request would take seconds."""
    query = pb.ChecksumQuery(unit_end=1, place_starts=[0], place_counts=[1])
    async with leased_sums(tmp_path) as ask:
        assert not (await ask([query] * limits.MAX_ASKED_PLANES)).checksums
        assert isinstance(await raised(ask([query] * (limits.MAX_ASKED_PLANES + 1))), InvalidField)


async def test_calls_that_ask_again_and_again_for_many_sums_take_little_memory(tmp_path: Path) -> None:
    """Each of these calls looks at 65,536 pages."""
    pages, calls = 64, 16
    query = pb.ChecksumQuery(planes=["layers.0/key"], unit_begin=7, unit_end=8, place_starts=[0], place_counts=[1])
    async with leased_sums(tmp_path, pages) as ask:
        tracemalloc.start()
        try:
            await asyncio.gather(*(ask([query] * 1024) for _ in range(calls)))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 16 << 20


async def test_a_small_call_that_asks_for_many_places_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty bytes may ask for half a million places of thirty pages, which takes 24 ms."""
    begun, others, waited = threading.Event(), threading.Event(), list[bool]()

    def slow(*given: Any) -> Any:
        begun.set()
        waited.append(others.wait(TIMEOUT / 4))
        return places_of(*given)

    most = limits.MAX_ASKED_SUMS
    query = pb.ChecksumQuery(planes=["layers.0/key"], unit_end=1, place_starts=[0], place_counts=[most])
    async with leased_sums(tmp_path, 30) as ask:
        monkeypatch.setattr(checksums, "places_of", slow)
        asking = asyncio.ensure_future(ask([query]))
        await asyncio.to_thread(begun.wait)
        others.set()
        assert len((await asking).checksums) == 30
    assert waited == [True]


@asynccontextmanager
async def leased_sums(
    tmp_path: Path, pages: int = 1
) -> AsyncIterator[Callable[[Sequence[pb.ChecksumQuery]], Awaitable[pb.ReadChecksumsResponse]]]:
    """Publish as many blocks as `pages`, with the sum of the first unit of each in a page of its own; give a reader's
    call, which asks for sums."""
    async with running(tmp_path) as node:
        await ready(node)
        blocks = pb.GroupBlocks(group="full", end_token=16 * pages, run_starts=[1], run_counts=[pages])
        await node.publish(1, groups=[blocks], checksums=True)
        parts = [
            pb.Checksums(plane="layers.0/key", unit_end=1, place_starts=[index], place_counts=[1], sums=[7])
            for index in range(pages)
        ]
        await node.source(pb.Notification(checksums=pb.PublishChecksums(publication=1, checksums=parts, last=True)))
        lease_id = (await node.read(1)).accepted.lease_id

        async def ask(queries: Sequence[pb.ChecksumQuery]) -> pb.ReadChecksumsResponse:
            request = pb.ReadChecksumsRequest(reader=proto(D), lease_id=lease_id, queries=queries)
            return await node.kv.ReadChecksums(request, timeout=TIMEOUT)

        yield ask


async def test_sums_of_a_rank_that_is_not_registered_yet_are_asked_for_again(tmp_path: Path) -> None:
    # After a restart of the home the scheduler may be back before its ranks.
    async with running(tmp_path) as node:
        await node.open_engine()
        await node.register(0, 2)
        await node.publish(1, checksums=True)

        async def sums(rank: int) -> pb.NotificationResult:
            page = pb.PublishChecksums(publication=1, rank=rank, last=True)
            return (await node.source(pb.Notification(checksums=page)))[0]

        assert (await sums(1)).error.reason == errors_pb2.HOME_RECOVERING
        assert (await sums(2)).error.metadata["field"] == "checksums.rank"
        await node.register(1, 2)
        assert (await sums(1)).WhichOneof("kind") == "done"


async def test_a_page_of_sums_in_very_many_parts_is_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(1, checksums=True)
        parts = [
            pb.Checksums(plane="layers.0/key", unit_end=1, place_starts=[index], place_counts=[1], sums=[0])
            for index in range(30_000)
        ]
        [answer] = await node.source(pb.Notification(checksums=pb.PublishChecksums(publication=1, checksums=parts)))
        assert answer.error.metadata["field"] == "checksums"


async def test_readers_that_take_no_answers_use_up_only_their_own_share(tmp_path: Path) -> None:
    budget = 64 << 20
    async with running(tmp_path, Limits(memory=budget, engine_memory=1 << 20)) as node:
        await node.open_engine()
        request = register_request()
        request.agent.metadata = b"m" * (2 << 20)
        request.agent.metadata_sha256 = hashlib.sha256(request.agent.metadata).digest()
        await node.kv.RegisterCache(request, timeout=TIMEOUT)
        await node.publish(1, groups=[SCATTERED])
        held, used = node.home.memory.held(P), node.home.memory.used
        # gRPC itself reads ahead only a little.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        channel = grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}", options=options)
        kv: Any = KVTransferStub(channel)
        # The readers use the engine_id of their victim.
        reader = pb.EngineRef(engine_id="reader", incarnation=P.incarnation)
        answers = [Stream(kv.Handshake(handshake_request(reader=reader), timeout=TIMEOUT)) for _ in range(100)]
        found = await asyncio.gather(*(raised_or_none(stream) for stream in answers))
        # No event says when the server has written as much as it may.
        for _ in range(int(TIMEOUT / 0.01)):
            if node.home.memory.used >= used + (4 << 20):
                break
            await asyncio.sleep(0.01)
        assert used + (4 << 20) <= node.home.memory.used <= budget
        # Nothing counts against the victim: the victim goes on, and so does another engine.
        assert node.home.memory.held(P) == held
        await node.open_engine(E)
        await node.register(ref=E)
        for victim, number in ((P, 2), (E, 1)):
            [answer] = await node.source(publish_notification(number, payload=b"x" * 65536), ref=victim)
            assert answer.WhichOneof("kind") == "published", answer
            told = await node.read(reference=reference(number, victim))
            assert told.HasField("accepted")
            assert told.HasField("complete")
        # Refused readers get a retry delay.
        late = await asyncio.gather(*(raised_or_end(stream) for stream in answers))
        errors_of = [error for error in (*found, *late) if isinstance(error, LimitReached)]
        assert errors_of
        assert all(error.retry_after for error in errors_of)
        await channel.close()


async def test_watch_gets_its_full_state_when_the_memory_is_used_up(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(memory=1 << 22, engine_memory=1 << 10)) as node:
        watch = await ready(node)
        for number in range(1, 101):
            await node.publish(number, payload=b"x" * 8192)
        await node.source(*(pb.Notification(abort=pb.Abort(publication=number)) for number in range(1, 51)))
        # Strangers take memory until less stays free than the engine holds.
        node.home.memory.take(E, (1 << 22) - node.home.memory.used - 10_000)
        await node.leaves(watch)
        again = Watch(node)
        kinds = await again.kinds(52)
        assert kinds == ["opened", *["released"] * 50, "synced"]


async def raised_or_end(stream: Stream) -> KvferryError | None:
    """Return the error with which a stream ends at once, if any."""
    try:
        while await asyncio.wait_for(stream.call.read(), 0.2) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "test")
    except asyncio.TimeoutError:
        pass
    return None


async def raised_or_none(stream: Stream) -> KvferryError | None:
    try:
        await stream.next()
    except KvferryError as error:
        return error
    return None


async def test_acknowledgements_and_reports_have_limits(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        [answer] = await node.source(pb.Notification(released_ack=pb.ReleasedAck(publications=range(65_537))))
        assert answer.error.metadata["field"] == "released_ack.publications"
        reports = [pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE) for rank in range(Limits().ranks + 1)]
        [answer] = await node.reader(pb.Notification(read_done=pb.ReadDone(lease_id=b"x" * 16, reports=reports)))
        assert answer.error.metadata["field"] == "reports"


async def test_reported_bytes_count_up_to_the_bytes_that_the_source_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(1)
        lease_id = (await node.read(1)).accepted.lease_id
        report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=2**64 - 1)
        done = pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=[report]))
        with node.home.turn():
            publication = node.home.records.engines[P].publications[1]
            blocks, engine = publication.blocks, node.home.engines.find(P)
        held = sum(plane.bytes_per_block for one in engine.ranks.values() for plane in one.geometry.planes)
        [answer] = await node.reader(done)
        assert answer.read_ended.verdict == pb.VERDICT_VALID
        assert blocks
        assert node.home.journal.read_bytes == blocks * held
        assert node.home.journal.last_reads[-1]["bytes"] == blocks * held


async def test_caches_that_are_larger_than_a_field_are_listed_as_the_most_that_it_holds(tmp_path: Path) -> None:
    """An engine may state any cache: no list fails because of it, and so no page."""
    async with running(tmp_path) as node:
        await node.open_engine()
        one = replace(
            rank_geometry().planes[0],
            base=0,
            num_blocks=2**31 - 1,
            block_stride=1 << 31,
            unit_stride=1 << 28,
            token_stride=1 << 24,
            state_bytes=1 << 24,
            shared=True,
        )
        request = register_request(0, 1, geometry=RankGeometry(0, tuple(replace(one, layer=f"{n}") for n in range(5))))
        request.ClearField("agent")
        await node.kv.RegisterCache(request, timeout=TIMEOUT)
        [summary] = (await node.introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT)).engines
        assert summary.cache_bytes == 2**64 - 1


@pytest.mark.parametrize("name", ["decode-x\nprefill-0", "e\0", "e\x1b[31m", "e\u2028f", "e\u202ef", "e\x85"])
async def test_a_name_that_cannot_be_shown_is_refused_wherever_a_peer_chooses_one(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        named = pb.EngineRef(engine_id=name, incarnation=b"i" * 16)
        watch = node.kv.Watch(pb.WatchRequest(engine=named, session_secret=b"s" * 32, role=pb.WATCH_ROLE_SCHEDULER))
        assert isinstance(await raised_or_none(Stream(watch)), InvalidField)
        handshake = node.kv.Handshake(handshake_request(reader=named), timeout=TIMEOUT)
        assert isinstance(await raised_or_none(Stream(handshake)), InvalidField)
        [answer] = await node.source(publish_notification(1, request_id=name))
        assert answer.error.metadata["field"] == "publish.request_id"
        [answer] = await node.source(publish_notification(1, router_key=name, key=b"k" * 16))
        assert answer.error.metadata["field"] == "publish.router_key"
        layered = register_request(1, 2)
        layered.rank.planes[0].layer = name
        labelled = register_request(1, 2)
        labelled.rank.labels[name] = 1
        for request in (layered, labelled):
            error = await raised(node.kv.RegisterCache(request, timeout=TIMEOUT))
            assert "control characters" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a\N{NO-BREAK SPACE}b",
        "東京　モデル",
        "👨\u200d👩\u200d👧",
        "\U0001fae9",
        "org/model-7B@main",
        "chatcmpl-é:0",
    ],
)
async def test_names_that_people_write_are_taken_by_clients_and_homes(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as node:
        await ready(node)
        assert label("request_id", name) == name
        named = pb.EngineRef(engine_id=name, incarnation=incarnation_of(b"s" * 32))
        watch = Stream(
            node.kv.Watch(pb.WatchRequest(engine=named, session_secret=b"s" * 32, role=pb.WATCH_ROLE_SCHEDULER))
        )
        assert (await watch.next()).WhichOneof("event") == "opened"
        [answer] = await node.source(publish_notification(1, request_id=name, router_key=name, key=b"k" * 16))
        assert answer.WhichOneof("kind") == "published", answer
        watch.call.cancel()


async def test_a_heavy_batch_lets_others_have_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However fast the machine: every notification is work enough for a turn.
    monkeypatch.setattr(time_slices, "TIME_SLICE", 0.0)
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(1)
        lease_id = (await node.read(1)).accepted.lease_id
        small = pb.GroupBlocks(group="full", end_token=16 * 4096, run_starts=[1, 3] * 2048, run_counts=[1] * 4096)
        heavy = node.source(*(publish_notification(number, groups=[small]) for number in range(2, 120)))
        task = asyncio.create_task(heavy)
        renewals = 0
        while not task.done():
            [answer] = await node.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
            assert answer.WhichOneof("kind") == "renewed"
            renewals += 1
        assert {result.WhichOneof("kind") for result in await task} == {"published"}
        assert renewals > 3


async def test_sums_of_all_unreleased_publications_count_against_an_engines_limit(tmp_path: Path) -> None:
    def sums(publication: int, place: int) -> pb.Notification:
        one = pb.Checksums(plane="layers.0/key", unit_end=1, place_starts=[place], place_counts=[1], sums=[7])
        return pb.Notification(checksums=pb.PublishChecksums(publication=publication, checksums=[one]))

    async with running(tmp_path, Limits(checksum_bytes=2 * PAGE_OVERHEAD + 200)) as node:
        await ready(node)
        for number in (1, 2):
            await node.publish(number, checksums=True)
        *taken, refused = await node.source(sums(1, 0), sums(1, 1), sums(2, 0))
        assert [answer.WhichOneof("kind") for answer in taken] == ["done"] * 2
        assert refused.error.metadata["limit"] == "checksum_bytes"
        await node.source(pb.Notification(abort=pb.Abort(publication=1)))
        [answer] = await node.source(sums(2, 0))
        assert answer.WhichOneof("kind") == "done"


@pytest.mark.parametrize("parts", ["in one another", "apart", "of other units"])
async def test_a_page_of_sums_in_many_parts_lets_others_have_their_turn(
    tmp_path: Path, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However fast the machine: every part is work enough for a turn.
    monkeypatch.setattr(time_slices, "TIME_SLICE", -1.0)
    async with running(tmp_path) as node:
        await ready(node)
        await node.publish(
            1, groups=[pb.GroupBlocks(group="full", end_token=16 * 900, run_starts=[1], run_counts=[900])]
        )

        def part(plane: str, number: int) -> pb.Checksums:
            asked = pb.Checksums(plane=plane, unit_end=1, place_starts=[number], place_counts=[1], sums=[number])
            if parts == "in one another":
                asked.place_starts.append(500 + number)
                asked.place_counts.append(1)
                asked.sums.append(number)
            elif parts == "of other units":
                asked.unit_begin, asked.unit_end, asked.place_starts[:] = number % 8, number % 8 + 1, [number // 8]
            return asked

        sums = [
            part(f"layers.{layer}/{component}", number)
            for layer in range(2)
            for component in ("key", "value")
            for number in range(256)
        ]
        page = pb.Notification(checksums=pb.PublishChecksums(publication=1, checksums=sums))
        checksums = node.home.records.engines[P].publications[1].checksums
        task, seen = asyncio.create_task(node.source(page, page, page)), set[int]()
        while not task.done():
            seen.add(checksums.size)
            await asyncio.sleep(0)
        assert [result.WhichOneof("kind") for result in await task] == ["done"] * 3
        # Other calls had a turn before the first part, and after each.
        assert len(seen) == len(sums) + 1


@pytest.mark.slow
async def test_step_after_very_many_costs_no_more_than_a_step_after_few(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        watch = Watch(node)
        await watch.kinds(2)
        # Before a rank has registered, and before the snapshot's end, groups may have any name.
        groups = [pb.GroupBlocks(group=f"group {number}") for number in range(MAX_GROUPS)]
        steps = [publish_notification(1, step, last=False, groups=groups) for step in range(1200)]

        async def took(first: int, end: int) -> float:
            began = time.process_time()
            for result in await node.source(*steps[first:end]):
                assert result.WhichOneof("kind") == "published", result
            return time.process_time() - began

        early = await took(0, 100)
        for first in range(100, 1100, 100):
            await took(first, first + 100)
        assert await took(1100, 1200) < 4 * early


async def test_batch_of_an_engine_that_is_replaced_meanwhile_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_slices, "TIME_SLICE", 0.0)
    async with running(tmp_path) as node:
        watch = await ready(node)
        await node.publish(1)
        # A lease keeps the home's records of the engine.
        await node.read(1)
        batch = [publish_notification(number) for number in range(2, 500)]
        task = asyncio.create_task(raised(node.source(*batch)))
        for _ in range(100_000):
            if len(arrived(node.home.records)) >= 10:
                break
            await asyncio.sleep(0)
        watch.cancel()
        with node.home.turn():
            node.home.engines.close_engine(P)
        node.pass_by(TIMES.engine_ttl + 1)
        with node.home.turn():
            node.home.open_watch(Process(P2, Role.SCHEDULER), SECRETS[P2])
        assert isinstance(await task, PeerRestarted)
        assert len(arrived(node.home.records)) <= 1


async def test_flood_by_three_engines_is_refused_to_them_alone(tmp_path: Path) -> None:
    budget = 16 << 20
    async with running(tmp_path, Limits(memory=budget, engine_memory=256 << 10)) as node:
        for letter in "abc":
            flood = start(f"flood-{letter}", letter)
            await node.open_engine(flood)
            await node.register(ref=flood)
            number, refused = 1, False
            while not refused:
                batch = [publish_notification(number + index, payload=b"x" * 65536) for index in range(15)]
                aborts = [pb.Notification(abort=pb.Abort(publication=number + 100 + index)) for index in range(100)]
                results = await node.source(*batch, *aborts, ref=flood)
                errors_of = [result.error for result in results if result.WhichOneof("kind") == "error"]
                refused = any(
                    error.metadata["limit"] == "memory" and error.HasField("retry_after") for error in errors_of
                )
                number += 300
        assert node.home.memory.used <= budget
        watch = await ready(node)
        for number in range(1, 30):
            assert (await node.publish(number, payload=b"x" * 4096)).WhichOneof("kind") == "published"
            lease_id = (await node.read(number)).accepted.lease_id
            [renewed] = await node.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
            assert renewed.renewed.remaining.seconds > 0
            [ended] = await node.reader(read_done(lease_id, 0))
            assert ended.read_ended.verdict == pb.VERDICT_VALID
            assert (await watch.next()).released.publication == number
            await node.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[number])))
