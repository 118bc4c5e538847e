"""Strangers who can reach a node server, and what they cannot do to those who are on it: requests that end grpcio's
server, floods, and connections without end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry._wire.channel import connect, connect_async, parse_address
from kvferry._wire.status import from_rpc_error
from kvferry.errors import InternalError, InvalidField, LimitReached, Unreachable
from kvferry.geometry import RankGeometry
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from kvferry_server.node import connections
from kvferry_server.node.connections import ConnectionLimiter, connections_each, count_connections
from kvferry_server.node.limits import CONNECTION_POLL
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from kvferry_server.servicers.callers import host_of
from tests.support import http2
from tests.support.certificates import Authority, tls_flags
from tests.support.http2 import Connection, data, frame, message, request_headers
from tests.support.node_in_process import proto, register_request
from tests.support.node_servers import Kvferryd, serves
from tests.support.parties import SECRETS, P, rank_geometry
from tests.support.raw_parties import Party
from tests.support.stubs import KVTransferStub

PAUSE = 0.01
LIST_ENGINES = "/kvferry.v1.Introspection/ListEngines"
WATCH = "/kvferry.v1.KVTransfer/Watch"
NOTIFY = "/kvferry.v1.KVTransfer/Notify"
HANDSHAKE = "/kvferry.v1.KVTransfer/Handshake"
ATTACKS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvferryd]:
    path = tmp_path_factory.mktemp("strangers") / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0") as running:
        yield running


def request(stream: int, path: str, body: bytes | None = b"", /, **changed: bytes | None) -> bytes:
    """A call; without an end if there is no body."""
    head = frame(http2.HEADERS, http2.END_HEADERS, stream, request_headers(path, **changed))
    return head if body is None else head + b"".join(data(stream, message(body)))


def end_of_grpcio(address: str) -> None:
    """138 bytes that end grpcio's server."""
    with Connection(address) as peer:
        peer.send(request(1, "/", path=b"/\xff"))
        assert peer.ended(1)


@contextmanager
def party(address: str, name: str) -> Iterator[Party]:
    with connect(address) as channel:
        victim = Party(channel, name)
        victim.live()
        try:
            yield victim
        finally:
            victim.close()


def test_path_that_is_not_text_is_refused_and_ends_no_connection(server: Kvferryd) -> None:
    address = server.addresses[1]
    with party(server.address, "local") as local, party(address, "remote") as remote:
        for _ in range(ATTACKS):
            end_of_grpcio(address)
        for victim in (local, remote):
            # The stream was opened before the attacks.
            assert victim._watch.is_active()
            victim.works()
    assert server.running


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_node_server_fails_as_soon_as_grpc_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service manager starts it again, and its engines fill it again."""
    schedule, broken = cygrpc._schedule_rpc_coro, list[object]()

    def fails_once(handling: Coroutine[Any, Any, None], *rest: Any) -> Any:
        if broken:
            return schedule(handling, *rest)
        broken.append(handling)
        handling.close()
        raise MemoryError

    path = tmp_path / "node.sock"
    node = NodeServer(configure(unix=str(path), listen="127.0.0.1:0"))
    await node.start()
    failed = asyncio.create_task(node.failed())
    monkeypatch.setattr(cygrpc, "_schedule_rpc_coro", fails_once)
    async with connect_async(node.addresses[1]) as channel:
        stub: Any = IntrospectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.ListEngines(ipb.ListEnginesRequest(), timeout=10)
        assert isinstance(from_rpc_error(caught.value, "server"), Unreachable)
        with pytest.raises(InternalError, match="gRPC's server has ended") as why:
            await asyncio.wait_for(failed, 10)
    assert isinstance(why.value.__cause__, MemoryError)
    await node.stop(0)
    assert not path.exists()


def eventually(succeeds: Callable[[], bool], within: float = 60.0) -> None:
    """Repeat a call until it succeeds."""
    given_up = threading.Event()
    timer = threading.Timer(within, given_up.set)
    timer.start()
    try:
        while True:
            try:
                assert succeeds()
                return
            except (grpc.RpcError, AssertionError):
                # Between two tries the server has the processor.
                if given_up.wait(PAUSE):
                    raise
    finally:
        timer.cancel()


def outcome(call: Any) -> str:
    """How a call ended: OK, LIMIT, or the code of an untyped error."""
    try:
        call.result(90) if hasattr(call, "result") else list(call)
    except grpc.RpcError as error:
        typed = from_rpc_error(error, "server")
        if isinstance(typed, LimitReached) and typed.retry_after is not None:
            return "LIMIT"
        return str(error.code())
    return "OK"


@pytest.mark.parametrize("kind", [0, 1], ids=["unix", "tcp"])
def test_calls_in_thousands_are_answered_or_refused_with_typed_errors(server: Kvferryd, kind: int) -> None:
    with ExitStack() as stack:
        # Separate connections: otherwise the channels of a process share one.
        channels = [
            stack.enter_context(
                grpc.insecure_channel(server.addresses[kind], options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(4)
        ]
        stubs = [IntrospectionStub(channel) for channel in channels]
        calls = [stubs[n % 4].ListEngines.future(ipb.ListEnginesRequest(), timeout=90) for n in range(3000)]
        ended = Counter(outcome(call) for call in calls)
    assert set(ended) <= {"OK", "LIMIT"}, ended
    assert ended["OK"] > 500


@pytest.mark.slow
def test_streams_in_thousands_are_open_or_refused_with_typed_errors(tmp_path: Path) -> None:
    """A host without a stream gets one, although another host has as many as it may."""
    with (
        Kvferryd("--unix", "", "--listen", "127.0.0.1:0", "--max-streams", "1000") as node,
        ExitStack() as stack,
    ):
        port = node.addresses[0].rpartition(":")[2]
        channels = [
            stack.enter_context(
                grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(4)
        ]
        stubs: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        streams = [stubs[n % 4].Watch(health_pb2.HealthCheckRequest()) for n in range(2000)]
        ended: Counter[str] = Counter()
        for stream in streams:
            try:
                next(stream)
                ended["open"] += 1
            except grpc.RpcError as error:
                typed = from_rpc_error(error, "server")
                ended["LIMIT" if isinstance(typed, LimitReached) and typed.retry_after else str(error.code())] += 1
        assert ended == {"open": 500, "LIMIT": 1500}
        # The loopback network is 127.0.0.0/8: another host, as far as the server can see.
        with Connection(f"127.0.0.1:{port}", source="127.0.0.2") as other:
            other.send(request(1, "/grpc.health.v1.Health/Watch"))
            assert other.answered(1)
        for stream in streams:
            stream.cancel()


@contextmanager
def flood_of_resets(address: str, path: str) -> Iterator[None]:
    stop = threading.Event()

    def flood() -> None:
        body = b"".join(data(1, message(b"")))[9:]
        while not stop.is_set():
            with Connection(address, source="127.0.0.9") as peer:
                for stream in range(1, 20_000, 2):
                    if stop.is_set() or peer.closed:
                        break
                    peer.send(
                        request(stream, path, None)
                        + frame(http2.DATA, http2.END_STREAM, stream, body)
                        + frame(http2.RST, 0, stream, b"\0\0\0\x08")
                    )

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        try:
            yield
        finally:
            stop.set()
        flooding.result(30)


def test_flood_of_resets_harms_only_its_own_connection(server: Kvferryd) -> None:
    address = server.addresses[1]
    with party(address, "flooded") as victim, flood_of_resets(address, LIST_ENGINES):
        for _ in range(30):
            victim.works()
        assert victim._watch.is_active()


def test_flood_of_reset_renewals_delays_no_renewal_beyond_its_lease(server: Kvferryd) -> None:
    """gRPC has one queue for all calls of a method, the flood's and the victim's. Repeated, as the SDK does."""
    address = server.addresses[1]
    with party(address, "renewing") as victim, flood_of_resets(address, NOTIFY):
        took: list[float] = []
        while len(took) < 6 and min(took, default=60) > 10:
            since = time.monotonic()
            eventually(lambda: bool(victim.notify_reader(pb.Notification(renew=pb.Renew(lease_id=b"l" * 16)))), 60)
            took.append(time.monotonic() - since)
        # A renewal has two thirds of a lease. On an idle machine all take 1 to 4 s.
        assert min(took) < 20
        assert victim._watch.is_active()


def test_requests_that_never_end_delay_no_other_calls(server: Kvferryd) -> None:
    """Bodies without an end, as many as may be read at once, and many more."""
    with ExitStack() as stack:
        for _ in range(10):
            peer = stack.enter_context(Connection(server.addresses[1]))
            for stream in range(1, 101, 2):
                peer.send(request(stream, HANDSHAKE, None), frame(http2.DATA, 0, stream, message(b"x", length=4 << 20)))
        with party(server.address, "unhurried") as victim:
            victim.works()


def test_request_of_a_stream_is_limited_in_size(server: Kvferryd) -> None:
    with connect(server.address) as channel:
        watch: Any = channel.unary_stream(WATCH)
        with pytest.raises(grpc.RpcError) as caught:
            list(watch(b"\0" * (65 * 1024), timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 400))
from kvferry_server.node.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_silent_connections_keep_no_others_out(tmp_path: Path) -> None:
    """As 1,100 do with 1,024 files: 400 with 400."""
    authority = Authority.make(tmp_path, "fleet")
    tls = authority.issue("node")
    path = tmp_path / "run" / "node.sock"
    arguments = ["--unix", str(path), "--listen", "127.0.0.1:0", *tls_flags(tls)]
    with Kvferryd(*arguments, program=("-c", LIMITED)) as node, ExitStack() as stack:
        assert "raised the limit of open files from 128 to 400" in node.log
        address = parse_address(node.addresses[1])
        for _ in range(400):
            try:
                stack.enter_context(socket.create_connection((address.host, address.port), 5))
            except OSError:
                break
        # The UNIX socket has its own limit; a client with a certificate connects when the silent handshakes have timed
        # out.
        with party(node.address, "local") as local:
            local.works()
            eventually(lambda: serves(f"localhost:{address.port}", tls))
            local.works()


def at_end(client: socket.socket) -> bool:
    """Whether the peer has ended the connection."""
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_host_with_the_most_connections_loses_its_newest() -> None:
    # On all addresses: otherwise the system may give the port to a client at another address.
    with socket.create_server(("", 0)) as listening, ExitStack() as stack:
        port = listening.getsockname()[1]
        keeper = ConnectionLimiter(port, 40)

        def connected(source: str, count: int) -> list[tuple[socket.socket, socket.socket]]:
            pairs = []
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, (source, 0)))
                served, _ = listening.accept()
                served.setblocking(False)
                pairs.append((client, stack.enter_context(served)))
            return pairs

        first = connected("127.0.0.2", 5)
        quiet = connected("127.0.0.1", 10)
        assert keeper.check() == 0
        greedy = connected("127.0.0.2", 25)
        assert keeper.check() == 10
        assert keeper.check() == 10  # Nobody has closed what was shut down: the same again.
        for client, _ in (*quiet, *first):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        for client, _ in greedy:
            client.setblocking(False)
        # The kernel may hand over the ends of connections a moment later.
        eventually(lambda: sum(map(at_end, (client for client, _ in greedy))) == 10)


def test_sockets_of_an_embedding_engine_stay_unchanged() -> None:
    """The engine's process may have more open files than a server has connections, and a default timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        port = listening.getsockname()[1]
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        engines, _ = listening.accept()
        stack.enter_context(engines)
        engines.settimeout(None)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(5)
        try:
            ConnectionLimiter(port, 40).check()
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(engines.fileno())


async def test_open_files_are_looked_at_once_for_all_clients_that_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of 500 clients, with 3,000 connections open, that would keep the event loop for half a minute."""
    looks, found = list[int](), connections._connections

    def looked() -> Iterator[tuple[int, socket.socket, Any, Any]]:
        looks.append(1)
        return found()

    monkeypatch.setattr(connections, "_connections", looked)
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listening.getsockname(), 20)) for _ in range(9)]
        for _ in clients:
            stack.enter_context(listening.accept()[0]).setblocking(False)
        endings = connections.Endings()
        for client in clients[1:]:
            endings.end("ipv4:{}:{}".format(*client.getsockname()))
        assert [await asyncio.to_thread(client.recv, 1) for client in clients[1:]] == [b""] * 8
        clients[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[0].recv(1)
    assert len(looks) == 1


async def test_connections_are_ended_again_after_a_time_without_a_free_file() -> None:
    """An engine in whose process the server runs may open as many files as it is allowed."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listening.getsockname(), 20)) for _ in range(2)]
        for _ in clients:
            stack.enter_context(listening.accept()[0]).setblocking(False)
        endings, limiter = connections.Endings(), ConnectionLimiter(listening.getsockname()[1], 2)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            endings.end("ipv4:127.0.0.1:1")
            limiting, both_looked = asyncio.create_task(limiter.run()), asyncio.Event()
            asyncio.get_running_loop().call_later(2 * CONNECTION_POLL, both_looked.set)
            await both_looked.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await asyncio.to_thread(clients[1].recv, 1) == b""
        limiting.cancel()
        endings.end("ipv4:{}:{}".format(*clients[0].getsockname()))
        assert await asyncio.to_thread(clients[0].recv, 1) == b""


def test_connection_whose_descriptor_becomes_a_file_while_it_is_counted_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd = os.open(__file__, os.O_RDONLY | os.O_NONBLOCK)
    try:
        monkeypatch.setattr("stat.S_ISSOCK", lambda _: True)
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert count_connections(parse_address("127.0.0.1:1")) == 0
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("unix:", ""),
        ("unix:/run/x", ""),
        ("ipv4:10.0.0.7:5555", "10.0.0.7"),
        ("ipv6:%5Bfd00:1:2:3:4:5:6:7%5D:99", "fd00:1:2:3::/64"),
        ("ipv6:[::ffff:10.0.0.7]:99", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:99", "fe80::/64"),
    ],
)
def test_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_listeners_share_the_file_descriptors() -> None:
    assert connections_each(4096, 2, 20_000) == 4096
    assert connections_each(4096, 2, 1024) == 320
    assert connections_each(4096, 1, 64) == 8


def test_sighup_is_logged_and_does_not_end_the_server(tmp_path: Path) -> None:
    with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "") as node, party(node.address, "p") as victim:
        node.signal(signal.SIGHUP)
        eventually(lambda: "SIGHUP: reading the policy and the TLS files again" in node.log)
        victim.works()
        assert victim._watch.is_active()
        node.signal()
        assert node.wait() == 0


def relayed(address: str, home: str) -> Exception:
    """The result of a registration for this home."""
    with party(address, "relayed") as rank:
        wanted = rank.registration()
        wanted.home = home
        with pytest.raises(grpc.RpcError) as caught:
            rank.kv.RegisterCache(wanted, timeout=20)
    return from_rpc_error(caught.value, "server")


@pytest.mark.parametrize("home", ["10.255.255.1:1", "127.example.org:80", "metadata.internal:80", "[fd00::1]:1"])
def test_relay_to_another_host_is_refused_to_a_stranger(server: Kvferryd, home: str) -> None:
    assert isinstance(relayed(server.address, home), InvalidField)


def test_relay_to_a_socket_of_this_host_is_refused_to_a_stranger(server: Kvferryd, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service"))
        service.listen()
        service.setblocking(False)
        assert isinstance(relayed(server.address, f"unix:{tmp_path}/service"), InvalidField)
        with pytest.raises(BlockingIOError):
            service.accept()


@pytest.mark.slow
def test_relays_connect_only_to_named_homes(tmp_path: Path) -> None:
    arguments = ["--unix", str(tmp_path / "node.sock"), "--listen", "", "--relay-homes", "node*:7423, 127.0.0.1:9"]
    with Kvferryd(*arguments) as node:
        assert isinstance(relayed(node.address, "127.0.0.1:10"), InvalidField)
        # The server connects to the home, which does not exist.
        assert isinstance(relayed(node.address, "127.0.0.1:9"), Unreachable)


@pytest.mark.slow
def test_answers_that_clients_do_not_take_are_bounded() -> None:
    with (
        Kvferryd("--listen", "127.0.0.1:0", "--unix", "", "--drain", "0") as server,
        connect(server.advertise) as channel,
    ):
        stub: Any = KVTransferStub(channel)
        watch = stub.Watch(pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER))
        while next(watch).WhichOneof("event") != "synced":
            pass
        first = rank_geometry().planes[0]
        planes = tuple(
            dataclasses.replace(first, layer=f"{number}".rjust(250, "x"), base=first.base + (number << 32))
            for number in range(8000)
        )
        registered = register_request(geometry=RankGeometry(0, planes))
        registered.ClearField("agent")
        stub.RegisterCache(registered, timeout=60)
        asked = ipb.GetEngineRequest(engine_id=P.engine_id)
        assert IntrospectionStub(channel).GetEngine(asked, timeout=60).ByteSize() > 2 << 20
        calls = 60
        with Connection(server.advertise) as stranger:
            # The client opens no window, and so takes nothing.
            stranger.send(http2.settings({4: 0}))
            for stream in range(1, 2 * calls, 2):
                head = request_headers("/kvferry.v1.Introspection/GetEngine", grpc_timeout=None)
                stranger.send(frame(http2.HEADERS, http2.END_HEADERS, stream, head))
                stranger.send(*data(stream, message(asked.SerializeToString())))
            # Answers of this size are made one after another. The last is refused, long before the client is
            # disconnected.
            assert stranger.ended(2 * calls - 1)
            assert not stranger.closed
            # Small answers are not refused, and a client that takes nothing loses its connection.
            assert IntrospectionStub(channel).ListEngines(ipb.ListEnginesRequest(), timeout=20).engines
            assert stranger.ended(1)
            assert stranger.closed
        # The memory that gRPC kept for the client is free again.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(grpc.RpcError):
                IntrospectionStub(channel).GetEngine(asked, timeout=60)
                break
        assert time.monotonic() < deadline
        watch.cancel()
        # Answers that could not be sent are no failures of the server.
        assert "ExecuteBatchError" not in server.log
