"""The requests and errors that the guard around every handler passes or refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest

from kvferry._wire.channel import SERVER_OPTIONS, connect_async
from kvferry._wire.status import from_rpc_error
from kvferry.errors import (
    DeadlineRequired,
    EngineUnknown,
    InternalError,
    InvalidField,
    KvferryError,
    LimitReached,
    NotImplementedHere,
    ServerDraining,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferServicer, add_KVTransferServicer_to_server
from kvferry_server.home.time_slices import TimeSlices, Worker
from kvferry_server.node.grpc_server import Server
from kvferry_server.node.guard import UNKNOWN_METHOD, Guard
from kvferry_server.node.requests import Requests
from kvferry_server.servicers.access import TRUSTED
from tests.support.stubs import KVTransferStub

if TYPE_CHECKING:
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

SECRET = "the private text of an exception"


class Servicer(KVTransferServicer):
    """Acts by the request's engine_id."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def RegisterCache(self, request: pb.RegisterCacheRequest, context: Any) -> pb.RegisterCacheResponse:
        await self._behave(request.engine.engine_id)
        return pb.RegisterCacheResponse(home_epoch=b"epoch")

    async def Notify(self, request: pb.NotifyRequest, context: Any) -> pb.NotifyResponse:
        return pb.NotifyResponse()

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> pb.ReadBlocksResponse:
        await self._behave(request.reference)
        return pb.ReadBlocksResponse(home_epoch=b"epoch")

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:  # type: ignore[override]
        # A streaming handler of the other kind, which writes its messages.
        await context.write(pb.WatchResponse(home_epoch=b"epoch"))
        await self._behave(request.engine.engine_id)

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> AsyncIterator[bytes]:  # type: ignore[override]
        # Already encoded, like messages that many clients get.
        for _ in range(64 if request.engine_id == "much" else 0):
            yield pb.HandshakeResponse(home_epoch=LARGE_REQUEST).SerializeToString()
        yield pb.HandshakeResponse(home_epoch=b"epoch").SerializeToString()
        await self._behave(request.engine_id)

    async def ReadChecksums(self, request: pb.ReadChecksumsRequest, context: Any) -> pb.ReadChecksumsResponse:
        raise NotImplementedError

    async def _behave(self, how: str) -> None:
        if how == "typed":
            raise EngineUnknown("no engine 'x'", engine_id="x")
        if how == "crash":
            raise RuntimeError(SECRET)
        if how == "untyped":
            raise KvferryError(SECRET)
        if how == "wait":
            self.entered.set()
            await self.go_on.wait()


@asynccontextmanager
async def guarded(
    most: int = 1024, socket: Path | None = None
) -> AsyncIterator[tuple[KVTransferAsyncStub, Servicer, Guard, Any]]:
    guard, servicer = Guard(most, most, TRUSTED, Requests(Worker(), TimeSlices())), Servicer()
    server: Any = Server(SERVER_OPTIONS)  # grpcio's class has no types
    add_KVTransferServicer_to_server(servicer, server)
    server.offer(guard)
    port = server.add_insecure_port("127.0.0.1:0" if socket is None else f"unix:{socket}")
    await server.start()
    try:
        async with connect_async(f"127.0.0.1:{port}" if socket is None else f"unix:{socket}") as channel:
            yield cast("KVTransferAsyncStub", KVTransferStub(channel)), servicer, guard, channel
    finally:
        await server.stop(0)


async def read_all(call: Any) -> list[Any]:
    return [message async for message in call]


async def failure(call: Awaitable[Any]) -> KvferryError:
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(call, 10)
    return from_rpc_error(caught.value, "server")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def read_blocks(stub: KVTransferAsyncStub, how: str) -> list[Any]:
    return [await stub.ReadBlocks(pb.ReadBlocksRequest(reference=how), timeout=10)]


Call = Callable[["KVTransferAsyncStub", str], Awaitable[Any]]
CALLS: list[Call] = [
    lambda stub, how: stub.RegisterCache(pb.RegisterCacheRequest(engine=pb.EngineRef(engine_id=how)), timeout=10),
    lambda stub, how: read_all(stub.Handshake(pb.HandshakeRequest(engine_id=how), timeout=10)),
    lambda stub, how: read_blocks(stub, how),
    lambda stub, how: read_all(stub.Watch(pb.WatchRequest(engine=pb.EngineRef(engine_id=how)))),
]
every_kind = pytest.mark.parametrize("call", CALLS, ids=["unary", "yields", "waits", "writes"])


@every_kind
async def test_typed_errors_keep_their_type(call: Call) -> None:
    async with guarded() as (stub, *_):
        error = await failure(call(stub, "typed"))
        assert type(error) is EngineUnknown
        assert error.values == {"engine_id": "x"}


@every_kind
@pytest.mark.parametrize("how", ["crash", "untyped"])
async def test_untyped_exceptions_go_to_the_log_only(call: Call, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with guarded() as (stub, *_):
        with caplog.at_level(logging.ERROR):
            error = await failure(call(stub, how))
        assert isinstance(error, InternalError)
        assert SECRET not in str(error) + str(error.values)
        assert error.values["error_id"] in caplog.text
        assert SECRET in caplog.text
        assert "Traceback" in caplog.text


async def test_deadline_is_required_except_for_watch() -> None:
    async with guarded() as (stub, *_):
        assert isinstance(await failure(stub.RegisterCache(pb.RegisterCacheRequest())), DeadlineRequired)
        assert isinstance(await failure(read_all(stub.Handshake(pb.HandshakeRequest()))), DeadlineRequired)
        assert isinstance(await failure(stub.ReadBlocks(pb.ReadBlocksRequest())), DeadlineRequired)
        assert len(await read_all(stub.Watch(pb.WatchRequest()))) == 1


@pytest.mark.parametrize("method", ["RegisterCache", "ReadBlocks", "Handshake"])
async def test_bytes_that_are_no_message_are_an_invalid_field(method: str) -> None:
    async with guarded() as (stub, _, __, channel):
        path = f"/kvferry.v1.KVTransfer/{method}"
        garbage = b"\xff\xff\xff garbage"
        raw: Any = (
            channel.unary_unary(path)(garbage, timeout=10)
            if method != "Handshake"
            else read_all(channel.unary_stream(path)(garbage, timeout=10))
        )
        error = await failure(raw)
        assert isinstance(error, InvalidField)
        assert f"{method}Request" in error.values["expected"]
        assert (await stub.RegisterCache(pb.RegisterCacheRequest(), timeout=10)).home_epoch == b"epoch"


async def test_message_that_is_already_encoded_is_sent_unchanged() -> None:
    async with guarded() as (stub, *_):
        (message,) = await read_all(stub.Handshake(pb.HandshakeRequest(), timeout=10))
        assert message == pb.HandshakeResponse(home_epoch=b"epoch")


async def test_unknown_method_gets_a_typed_error() -> None:
    async with guarded() as (stub, _, __, channel):
        error = await failure(stub.ReadChecksums(pb.ReadChecksumsRequest(), timeout=10))
        assert isinstance(error, NotImplementedHere)
        unknown: Any = channel.unary_unary("/kvferry.v1.KVTransfer/Teleport")(b"", timeout=10)
        error = await failure(unknown)
        assert isinstance(error, NotImplementedHere)
        # The path is never decoded, in versions of grpcio that allow it.
        assert error.values["what"] in (UNKNOWN_METHOD, "/kvferry.v1.KVTransfer/Teleport")


async def test_calls_over_the_limit_get_a_retry_delay() -> None:
    async with guarded(1) as (stub, servicer, _, __):
        waiting = asyncio.ensure_future(CALLS[0](stub, "wait"))
        await asyncio.wait_for(servicer.entered.wait(), 10)
        error = await failure(CALLS[0](stub, ""))
        assert isinstance(error, LimitReached)
        assert error.values == {"limit": "max_calls", "value": "1"}
        assert error.retryable
        # Streams, and calls that wait, are counted separately.
        assert len(await read_all(stub.Watch(pb.WatchRequest()))) == 1
        assert len(await read_blocks(stub, "")) == 1
        servicer.go_on.set()
        assert (await waiting).home_epoch == b"epoch"
        assert await CALLS[0](stub, "")


async def test_stream_over_the_limit_does_not_end_the_first() -> None:
    async with guarded(1) as (stub, servicer, guard, _):
        waiting = asyncio.ensure_future(CALLS[1](stub, "wait"))
        await asyncio.wait_for(servicer.entered.wait(), 10)
        for more in CALLS[1:]:
            error = await failure(more(stub, ""))
            assert isinstance(error, LimitReached)
            assert error.values["limit"] == "max_streams"
        servicer.go_on.set()
        assert len(await waiting) == 1
        assert await guard.streams_ended(10)


@pytest.mark.parametrize("call", CALLS[1::2], ids=["yields", "writes"])
async def test_streams_end_with_draining_and_calls_go_on(call: Call) -> None:
    async with guarded() as (stub, servicer, guard, _):
        waiting = asyncio.ensure_future(call(stub, "wait"))
        await asyncio.wait_for(servicer.entered.wait(), 10)
        guard.end_streams()
        assert isinstance(await failure(waiting), ServerDraining)
        assert await guard.streams_ended(10)
        assert isinstance(await failure(call(stub, "")), ServerDraining)
        assert await CALLS[0](stub, "")


async def test_stream_ends_when_its_client_leaves() -> None:
    async with guarded() as (stub, servicer, guard, _):
        watch: Any = stub.Watch(pb.WatchRequest(engine=pb.EngineRef(engine_id="wait")))
        await watch.read()
        await asyncio.wait_for(servicer.entered.wait(), 10)
        watch.cancel()
        assert await guard.streams_ended(10)


@pytest.mark.parametrize(("over", "allowed"), [("TCP", 4), ("UNIX", 8)])
async def test_host_has_half_of_the_calls_and_the_socket_all(over: str, allowed: int, tmp_path: Path) -> None:
    """Callers on the UNIX socket cannot be told apart."""
    socket = tmp_path / "s" if over == "UNIX" else None
    async with guarded(8, socket) as (stub, servicer, guard, _):
        waiting = [asyncio.ensure_future(CALLS[0](stub, "wait")) for _ in range(allowed)]
        await asyncio.wait_for(until(lambda: guard.calls.used == allowed), 10)
        error = await failure(CALLS[0](stub, ""))
        assert isinstance(error, LimitReached)
        assert error.values == {"limit": "max_calls", "value": "8"}
        servicer.go_on.set()
        await asyncio.gather(*waiting)
        assert await CALLS[0](stub, "")


def test_hosts_share_the_calls() -> None:
    budget, shares = Guard(100, 1, TRUSTED, Requests(Worker(), TimeSlices())).calls, []
    for host in "abc":
        while budget.fits(host):
            budget.take(host)
        shares.append(budget.held(host))
    assert shares == [50, 25, 12]
    budget.give("a", 50)
    # A host may have the call that another host ends, and one call is free for a host that has none.
    assert budget.fits("b")
    while budget.fits("b"):
        budget.take("b")
    assert budget.fits("new")


async def unfinished(channel: Any, count: int) -> list[Any]:
    """Requests of which no byte arrives."""
    calls = [channel.stream_unary("/kvferry.v1.KVTransfer/RegisterCache")(timeout=60) for _ in range(count)]
    for call in calls:
        await call.wait_for_connection()
    return calls


async def test_requests_that_do_not_arrive_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_server.node.requests.REQUEST_TIMEOUT", 0.5)
    async with guarded() as (stub, _, __, channel):
        # Fewer than the slots of a host, so that no call waits for a slot.
        slow = await unfinished(channel, 10)
        assert (await stub.RegisterCache(pb.RegisterCacheRequest(), timeout=30)).home_epoch == b"epoch"
        for call in slow:
            error = await failure(call)
            assert isinstance(error, InvalidField)
            assert error.values["value"] == "'unfinished'"


async def test_call_without_a_request_is_an_invalid_field() -> None:
    async with guarded() as (_, __, ___, channel):
        call = channel.stream_unary("/kvferry.v1.KVTransfer/RegisterCache")(timeout=10)
        await call.done_writing()
        assert isinstance(await failure(call), InvalidField)


LARGE_REQUEST = b"x" * (300 * 1024)


def target(channel: Any) -> str:
    """Where it leads."""
    return str(channel._channel.target.decode())


async def test_answers_that_clients_do_not_take_keep_no_others_out(caplog: pytest.LogCaptureFixture) -> None:
    """Large handshakes keep no slot and no turn while they are answered."""
    async with guarded() as (stub, _, __, channel):
        large = pb.HandshakeRequest(engine_id="much", incarnation=LARGE_REQUEST)
        untaken = [stub.Handshake(large, timeout=300) for _ in range(40)]
        await asyncio.gather(*(call.wait_for_connection() for call in untaken))
        # Another connection, because the connection above is full.
        async with grpc.aio.insecure_channel(target(channel), options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            another = cast("KVTransferAsyncStub", KVTransferStub(other))
            asked = pb.HandshakeRequest(incarnation=LARGE_REQUEST)
            assert len(await asyncio.wait_for(read_all(another.Handshake(asked, timeout=60)), 30)) == 1
        for call in untaken:
            call.cancel()
    # A client that leaves in the middle of an answer is no failure of the server.
    assert "failed, error_id" not in caplog.text
    assert "ExecuteBatchError" not in caplog.text


async def test_requests_that_do_not_arrive_keep_no_others_waiting() -> None:
    async with guarded() as (stub, _, __, channel):
        slow = await unfinished(channel, 200)
        before = asyncio.get_running_loop().time()
        assert (await stub.RegisterCache(pb.RegisterCacheRequest(), timeout=60)).home_epoch == b"epoch"
        # Thirteen times the slots of a host, each of which could be taken for ten seconds.
        assert asyncio.get_running_loop().time() - before < 20
        # The calls that were ended to make room. gRPC does not define the order in which it hands calls over.
        ended = [await failure(call) for call in slow if call.done()]
        assert len(ended) > 100
        assert all(isinstance(error, LimitReached) and error.retryable for error in ended)
        for call in slow:
            call.cancel()


async def test_geometries_in_work_keep_no_renewal_out() -> None:
    async with guarded() as (stub, servicer, *_):
        waits = pb.RegisterCacheRequest(
            engine=pb.EngineRef(engine_id="wait", incarnation=LARGE_REQUEST), session_secret=b""
        )
        busy = [asyncio.ensure_future(stub.RegisterCache(waits, timeout=60)) for _ in range(40)]
        await asyncio.wait_for(servicer.entered.wait(), 10)
        assert await stub.Notify(pb.NotifyRequest(), timeout=10) == pb.NotifyResponse()
        servicer.go_on.set()
        await asyncio.gather(*busy)


async def test_host_has_one_heavy_request_in_work() -> None:
    async with guarded() as (stub, servicer, guard, _):
        heavy = pb.RegisterCacheRequest(engine=pb.EngineRef(engine_id="wait", incarnation=b"x" * (2 << 20)))
        first = asyncio.ensure_future(stub.RegisterCache(heavy, timeout=60))
        await asyncio.wait_for(servicer.entered.wait(), 10)
        # Until no timer keeps the turn of this host: then only the first request does.
        arriving = guard.requests._arriving
        await asyncio.wait_for(until(lambda: not any(found._timer for found in arriving.values())), 10)
        servicer.entered.clear()
        second = asyncio.ensure_future(stub.RegisterCache(heavy, timeout=60))
        await asyncio.wait_for(until(lambda: guard.requests.memory.used > 4 << 20), 10)
        # It has arrived, and small requests that came later are done.
        for _ in range(20):
            await stub.RegisterCache(pb.RegisterCacheRequest(), timeout=10)
        assert not servicer.entered.is_set()
        servicer.go_on.set()
        await asyncio.gather(first, second)
