"""How a server ends: in order, quickly, and leaving nothing."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.channel import connect, connect_async
from kvferry._wire.status import from_rpc_error
from kvferry.errors import InternalError, ServerDraining, Unavailable
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.publications import PublicationStage
from kvferry_server.home.home import Home
from kvferry_server.node import server as server_module
from kvferry_server.node.loading import configure
from kvferry_server.node.main import _serve
from kvferry_server.node.server import NodeServer
from tests.support import http2
from tests.support.http2 import Connection, data, frame, message, request_headers
from tests.support.node_servers import Kvferryd
from tests.support.stubs import KVTransferStub

if TYPE_CHECKING:
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

# Far longer than a test may take: a server that ends at all has not waited for the grace.
LONG = ["--drain", "3600"]


@contextmanager
def watching(address: str) -> Iterator[Any]:
    """An engine's Watch, its full state received."""
    with connect(address) as channel:
        secret = new_session_secret()
        engine = pb.EngineRef(engine_id=f"engine-{secrets.token_hex(4)}", incarnation=incarnation_of(secret))
        request = pb.WatchRequest(engine=engine, session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER)
        watch = KVTransferStub(channel).Watch(request)
        for event in watch:
            if event.WhichOneof("event") == "synced":
                break
        yield watch


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def rest_of(stream: Any) -> tuple[list[Any], grpc.RpcError]:
    """The remaining messages of a stream, and its status."""
    events: list[Any] = []
    with pytest.raises(grpc.RpcError) as caught:
        events.extend(stream)
    return events, caught.value


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_streams_are_ended_by_a_drain_and_do_not_delay_it(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0", *LONG) as server, connect(server.address) as channel:
        health_stub: Any = health_pb2_grpc.HealthStub(channel)
        health = health_stub.Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        with watching(server.address) as first, watching(server.addresses[1]) as second:
            server.signal(number)
            for watch in (first, second):
                events, error = rest_of(watch)
                assert [event.WhichOneof("event") for event in events] == ["draining"]
                assert isinstance(from_rpc_error(error, "server"), Unavailable)
            states, _ = rest_of(health)
            assert [state.status for state in states] == [health_pb2.HealthCheckResponse.NOT_SERVING]
        assert server.wait() == 0
        assert "stopped" in server.log
    assert names(tmp_path) == set()


def test_client_that_takes_no_health_keeps_nobody_waiting(tmp_path: Path) -> None:
    with (
        Kvferryd("--unix", "", "--listen", "127.0.0.1:0", *LONG) as server,
        Connection(server.address, preface=False) as deaf,
        connect(server.address) as channel,
    ):
        # The client opens no window, and so takes nothing.
        head = request_headers("/grpc.health.v1.Health/Watch", grpc_timeout=None)
        deaf.send(http2.PREFACE, http2.settings({4: 0}), frame(http2.HEADERS, http2.END_HEADERS, 1, head))
        deaf.send(*data(1, message(b"")))
        assert deaf.answered(1, by=http2.HEADERS)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        # Sooner than the server ends the connection of a client that answers no pings.
        health = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        server.signal()
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        deaf.close()
        assert server.wait() == 0


def test_second_signal_stops_the_server_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "", *LONG) as server, watching(server.address):
        server.signal()
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert names(tmp_path) == set()


async def test_drain_keeps_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen=""))
    await server.start()
    steps: list[str] = []

    def recorded(owner: Any, name: str, *, later: bool) -> None:
        wrapped = getattr(owner, name)

        async def coroutine(*arguments: Any) -> Any:
            steps.append(name)
            return await wrapped(*arguments)

        def function(*arguments: Any) -> Any:
            steps.append(name)
            return wrapped(*arguments)

        monkeypatch.setattr(owner, name, coroutine if later else function)

    recorded(server._health, "enter_graceful_shutdown", later=True)
    recorded(server.home, "drain", later=False)
    recorded(server, "_leases_end", later=True)
    recorded(server.home, "end_watches", later=False)
    recorded(server._guards[0], "end_streams", later=False)
    recorded(server._listeners[0], "stop", later=True)
    await server.stop()
    assert steps == ["enter_graceful_shutdown", "drain", "_leases_end", "end_watches", "end_streams", "stop"]
    assert names(tmp_path) == set()


async def test_stream_that_does_not_end_is_cancelled(tmp_path: Path) -> None:
    server = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", drain=3600))
    await server.start()

    loop, opened = asyncio.get_running_loop(), asyncio.Event()

    def watch_health() -> Unavailable:
        with connect(server.addresses[0]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            stream = stub.Watch(health_pb2.HealthCheckRequest())
            next(stream)
            loop.call_soon_threadsafe(opened.set)
            error = from_rpc_error(rest_of(stream)[1], "server")
            assert isinstance(error, Unavailable)
            return error

    reading = asyncio.ensure_future(asyncio.to_thread(watch_health))
    await opened.wait()
    await server.stop()
    assert isinstance(await reading, ServerDraining)


async def test_server_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    async_first = NodeServer(configure(unix=str(tmp_path / "first.sock"), listen="127.0.0.1:0"))
    await async_first.start()
    try:
        taken = async_first.addresses[1]
        second = NodeServer(configure(unix=str(tmp_path / "second.sock"), listen=taken))
        with pytest.raises(Exception, match="in use"):
            await second.start()
        assert names(tmp_path) == {"first.sock", "first.sock.lock"}
    finally:
        await async_first.stop(0)
    assert names(tmp_path) == set()


async def test_drain_waits_for_live_leases_and_takes_their_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", drain=3600))
    await server.start()
    # The publication that the third call waits for will not come.
    stages = (False, PublicationStage.PUBLISHED), (True, PublicationStage.PUBLISHED), (True, PublicationStage.AWAITED)
    leases = [SimpleNamespace(live=live, publication=SimpleNamespace(stage=stage)) for live, stage in stages]
    monkeypatch.setattr(server.home.records, "leases", lambda: iter(leases))
    stopping = asyncio.ensure_future(server.stop())
    async with connect_async(server.addresses[0]) as channel:
        stub = cast("KVTransferAsyncStub", KVTransferStub(channel))
        while not server.home.draining:  # noqa: ASYNC110
            await asyncio.sleep(0)
        answer = await stub.Notify(pb.NotifyRequest(), timeout=10)
        assert answer.home_epoch == server.home.epoch
        assert not stopping.done()
        leases[1].live = False
        await stopping


async def test_server_whose_home_has_stopped_raises_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Home, "run", broken)
    server = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen=""))
    await server.start()
    with pytest.raises(InternalError) as caught:
        await server.failed()
    assert isinstance(caught.value.__cause__, RuntimeError)
    await server.stop(0)
    assert names(tmp_path) == set()


class Ended:
    """A node server that ends by a bug after a SIGTERM, during a reload, and that does not end its drain by itself."""

    addresses: tuple[str, ...] = ()
    advertise = admin = ""
    home = SimpleNamespace(epoch=bytes(16))

    def __init__(self, *_: object, **__: object) -> None:
        self.reloading = asyncio.Event()

    async def start(self) -> None:
        await came(signal.SIGHUP)

    async def failed(self) -> None:
        await self.reloading.wait()
        raise InternalError("a bug")

    async def reload(self) -> None:
        await came(signal.SIGTERM)
        self.reloading.set()
        await came()

    async def stop(self, grace: float | None = None) -> None:
        if grace is None:
            await came(signal.SIGTERM)
            await asyncio.Event().wait()


async def came(*numbers: signal.Signals) -> None:
    """Send signals to this process, and let the event loop take them."""
    for number in numbers:
        signal.raise_signal(number)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_second_signal_stops_a_server_at_once_that_failed_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "NodeServer", Ended)
    monkeypatch.setattr("gc.freeze", lambda: None)  # Otherwise no later test here could collect what is here now.
    loaded: Any = SimpleNamespace(config=SimpleNamespace(drain=3600))
    native: Any = SimpleNamespace(failed_handshakes=None)
    await asyncio.wait_for(_serve(loaded, native), 20)
