"""R7, R8, R9: whatever a caller sends, it gets a typed error, nothing is written, and the server serves the next
one."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSession, EngineSpec, Group, Interval, MemoryKind, MemoryRegion
from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._loop import Loop
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto, region_to_proto
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry._wire.token import engine_ref
from kvferry.errors import (
    BadBlock,
    BadGeometry,
    BlocksShort,
    EngineIdInUse,
    EngineUnknown,
    Incompatible,
    InvalidField,
    KvferryError,
    PeerRestarted,
    WrongSession,
)
from kvferry.geometry import RankGeometry
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.caches import Model, shards
from tests.support.engines import Engine
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.stubs import KVTransferStub

MakeEngine = Callable[..., Engine]
Homes = tuple[str, str]
MODEL = Model()


@pytest.fixture
def stub(homes: Homes) -> Iterator[KVTransferStub]:
    with grpc.insecure_channel(homes[0]) as channel:
        yield KVTransferStub(channel)


def fails(call: Callable[[], object]) -> KvferryError:
    """The typed error of a raw call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value, "test")


@pytest.fixture
def alive(homes: Homes) -> Iterator[None]:
    """The server serves a newcomer after the test as before."""
    yield
    with Client(homes[0]) as client:
        session = registered(client, unique_id("after"))
        assert session.publish("still here", {"full": Blocks([1])}).number == 1


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ({"full": Blocks([1, 2, 32])}, BadBlock),
        ({"full": Blocks([-1])}, BadBlock),
        ({"full": Blocks([1, 2, 1])}, BadBlock),
        ({"full": Blocks([])}, BlocksShort),
        ({"full": Blocks([1])}, BlocksShort),
        ({"other": Blocks([1, 2, 3])}, InvalidField),
        ({}, InvalidField),
        ({"full": Blocks([1, 2, 3], first_token=16)}, BlocksShort),
    ],
    ids=["out-of-range", "negative", "twice", "none", "too-few", "unknown-group", "no-group", "too-late"],
)
def test_bad_destination_blocks_are_refused_and_nothing_is_written(
    one_to_one: tuple[Engine, Engine], blocks: dict[str, Blocks], error: type[KvferryError]
) -> None:
    source, destination = one_to_one
    (rank,) = destination.ranks
    reference = source.session.publish("bad", {"full": Blocks([4, 5, 6])}).reference
    tokens = (
        (0, 48) if error is not BlocksShort or "full" not in blocks or blocks["full"].first_token == 0 else (16, 64)
    )
    with pytest.raises(error):
        rank.call("read", reference, blocks, tokens)
    assert (destination.memories[0].cells == 0xA5).all()
    assert rank.read(reference, [7, 8, 9], (0, 48)).bytes > 0


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        (pb.GroupBlocks(group="full", end_token=16, run_starts=[32], run_counts=[1]), BadBlock),
        (pb.GroupBlocks(group="full", end_token=16, run_starts=[2**31], run_counts=[1]), InvalidField),
        (pb.GroupBlocks(group="full", end_token=16, run_starts=[2**64 - 1], run_counts=[2]), InvalidField),
        (pb.GroupBlocks(group="full", end_token=16, run_starts=[0], run_counts=[2**32 - 1]), InvalidField),
        (pb.GroupBlocks(group="full", end_token=16, run_starts=[0, 1], run_counts=[1]), InvalidField),
        (pb.GroupBlocks(group="full", end_token=17, run_starts=[0], run_counts=[1]), KvferryError),
        (pb.GroupBlocks(group="full", first_token=9, end_token=8, run_starts=[0], run_counts=[1]), InvalidField),
        (pb.GroupBlocks(group="none", end_token=16, run_starts=[0], run_counts=[1]), InvalidField),
    ],
    ids=["out-of-range", "2^31", "wraps", "huge-run", "unequal", "short", "backwards", "unknown-group"],
)
@pytest.mark.usefixtures("alive")
def test_bad_published_blocks_are_refused(
    homes: Homes, stub: KVTransferStub, blocks: pb.GroupBlocks, error: type[KvferryError]
) -> None:
    with Client(homes[0]) as client:
        session = registered(client, unique_id("bad"))
        publish = pb.Publish(publication=1, request_id="x", groups=[blocks], last=True)
        request = pb.NotifyRequest(
            sender=engine_ref(session.token),
            session_secret=session.token.session_secret,
            notifications=[pb.Notification(publish=publish)],
        )
        (result,) = stub.Notify(request, timeout=5).results
        assert result.WhichOneof("kind") == "error"
        assert result.error.message
        assert isinstance(from_notification_error(result.error), error)


def registration(memory: np.ndarray, base_shift: int = 0) -> dict[str, Any]:
    base = memory.ctypes.data
    return {
        "planes": MODEL.planes(Interval(0, 4), base + base_shift),
        "regions": [MemoryRegion(MemoryKind.DRAM, 0, base, memory.nbytes)],
        "keep": memory,
        "serve": False,
    }


def registered(client: Client, engine_id: str) -> EngineSession:
    """An engine of one rank, opened and registered."""
    memory = np.zeros(MODEL.rank_bytes(Interval(0, 4)), np.uint8)
    return client.register_cache(EngineSpec(engine_id, (MODEL.group(),)), **registration(memory)).session


def test_planes_outside_registered_memory_are_refused_before_nixl_sees_them(homes: Homes) -> None:
    memory = np.zeros(MODEL.rank_bytes(Interval(0, 4)), np.uint8)
    spec, outside = EngineSpec(unique_id("out"), (MODEL.group(),)), registration(memory, base_shift=1)
    with Client(homes[0]) as client, pytest.raises(BadGeometry, match="no registered memory region"):
        client.register_cache(spec, **outside)


def test_server_checks_regions_itself(homes: Homes, stub: KVTransferStub) -> None:
    with Client(homes[0]) as client:
        session = client.open_engine(EngineSpec(unique_id("lies"), (MODEL.group(),)))
        rank = RankGeometry(0, tuple(MODEL.planes(Interval(0, 4), 1 << 40)))
        request = pb.RegisterCacheRequest(
            engine=engine_ref(session.token),
            session_secret=session.token.session_secret,
            num_ranks=1,
            groups=[group_to_proto(MODEL.group())],
            rank=rank_to_proto(rank),
        )
        request.agent.name = "a"
        request.agent.metadata = b"blob"
        request.agent.metadata_sha256 = b"\0" * 32
        request.agent.regions.append(region_to_proto(MemoryRegion(MemoryKind.DRAM, 0, 1 << 40, 16)))
        assert isinstance(fails(lambda: stub.RegisterCache(request, timeout=5)), KvferryError)
        request.rank.planes[0].block_stride = 2**64 - 4096
        assert isinstance(fails(lambda: stub.RegisterCache(request, timeout=5)), BadGeometry)


def test_handshake_with_an_unknown_engine(homes: Homes, stub: KVTransferStub) -> None:
    reader = pb.EngineRef(engine_id="reader", incarnation=b"r" * 16)
    rank = rank_to_proto(RankGeometry(0, tuple(MODEL.planes(Interval(0, 4), 1 << 40))))
    request = pb.HandshakeRequest(
        engine_id=unique_id("nobody"), reader=reader, groups=[group_to_proto(MODEL.group())], rank=rank
    )
    error = fails(lambda: list(stub.Handshake(request, timeout=5)))
    assert isinstance(error, EngineUnknown) or error.reason == "HOME_RECOVERING"


def test_incompatible_caches_are_refused_at_handshake_naming_every_field(engine: MakeEngine, homes: Homes) -> None:
    source = engine(homes[0], MODEL, shards(4, 1), identity={"model": "a", "rope": "1e4"})
    other = Model(head_dim=16)
    destination = engine(homes[1], other, shards(4, 1), serve=False, identity={"model": "b", "rope": "1e4"})
    source.ready()
    (rank,) = destination.ready().ranks
    reference = source.session.publish("x", {"full": Blocks([1])}).reference
    with pytest.raises(Incompatible) as caught:
        rank.read(reference, [1], None)
    named = {
        (mismatch.where, mismatch.field, mismatch.source, mismatch.destination) for mismatch in caught.value.mismatches
    }
    assert ("identity", "model", "a", "b") in named
    assert ("layers.0/key", "state_bytes", "16", "32") in named
    assert not any(mismatch.field == "rope" for mismatch in caught.value.mismatches)


def test_units_that_nobody_holds_are_refused_at_handshake(engine: MakeEngine, homes: Homes) -> None:
    source = engine(homes[0], MODEL, [Interval(0, 1), Interval(1, 3)], partial=True)
    destination = engine(homes[1], MODEL, shards(4, 1), serve=False)
    source.ready()
    (rank,) = destination.ready().ranks
    reference = source.session.publish("x", {"full": Blocks([1])}).reference
    with pytest.raises(Incompatible, match=r"units \[3, 4\)"):
        rank.read(reference, [1], None)


def test_another_process_cannot_speak_in_an_engines_name(homes: Homes, stub: KVTransferStub) -> None:
    with Client(homes[0]) as client:
        session = registered(client, unique_id("mine"))
        publication = session.publish("x", {"full": Blocks([1])})
        abort = pb.Notification(abort=pb.Abort(publication=publication.number))
        request = pb.NotifyRequest(sender=engine_ref(session.token), session_secret=b"0" * 32, notifications=[abort])
        assert isinstance(fails(lambda: stub.Notify(request, timeout=5)), WrongSession)


@pytest.fixture
def settled(tmp_path: Path) -> Iterator[str]:
    """The address of a home that takes one incarnation of an engine_id at a time."""
    with NodeServerProcess(tmp_path / "settled", engine_ttl=1) as server:
        server.settled()
        yield server.address


def test_second_process_with_the_same_engine_id_is_refused_while_the_first_lives(
    settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EngineSpec(unique_id("twin"), (MODEL.group(),))
    watch, watched = Control.watch, list[pb.WatchRequest]()

    def counted(control: Control, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        watched.append(request)
        return watch(control, request)

    with Client(settled) as first:
        first.open_engine(spec)
        # The second one's time is over once it asks again, however late the first answer came.
        monkeypatch.setattr(Control, "watch", counted)
        clock = partial(Loop, clock=lambda: now() + 1e6 * (len(watched) > 1))
        monkeypatch.setattr("kvferry._client.Loop", clock)
        with Client(settled) as second, pytest.raises(EngineIdInUse) as caught:
            second.open_engine(spec, timeout=1e5)
        assert caught.value.retryable


def test_reference_to_a_former_incarnation_is_told_so(engine: MakeEngine, homes: Homes, settled: str) -> None:
    engine_id = unique_id("restarted")
    with Client(settled) as old:
        reference = registered(old, engine_id).publish("x", {"full": Blocks([1])}).reference
    source = engine(settled, MODEL, shards(4, 1), engine_id=engine_id)
    destination = engine(homes[1], MODEL, shards(4, 1), serve=False)
    source.ready()
    (rank,) = destination.ready().ranks
    with pytest.raises(PeerRestarted):
        rank.read(reference, [1], None)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("method", ["RegisterCache", "Handshake", "ReadBlocks", "Notify", "Watch"])
def test_bytes_that_are_no_message_are_answered_with_a_status(homes: Homes, method: str) -> None:
    random = np.random.default_rng(7)
    with grpc.insecure_channel(homes[0]) as channel:
        make = channel.unary_stream if method in ("Handshake", "Watch") else channel.unary_unary
        call: Any = make(f"/kvferry.v1.KVTransfer/{method}", request_serializer=None, response_deserializer=None)
        for size in (1, 7, 64, 1000, 100_000):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(random.bytes(size), timeout=5))
            assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("alive")
def test_frame_larger_than_the_limit_ends_in_a_status(homes: Homes) -> None:
    with grpc.insecure_channel(homes[0], options=[("grpc.max_send_message_length", -1)]) as channel:
        call: Any = channel.unary_unary(
            "/kvferry.v1.KVTransfer/Notify", request_serializer=None, response_deserializer=None
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\0" * (64 << 20), timeout=20)
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize(
    "garbage", [b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999]
)
def test_garbage_on_the_port_closes_that_connection_only(homes: Homes, garbage: bytes) -> None:
    host, port = homes[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def test_group_that_contradicts_itself_cannot_be_made() -> None:
    with pytest.raises(BadGeometry):
        Group("full", block_tokens=16, num_blocks=4, null_block=4)
