"""A home behind a real gRPC server on a UNIX socket, with the guard that kvferryd has, and a clock turned by hand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from kvferry._wire.channel import SERVER_OPTIONS
from kvferry._wire.geometry_codec import Handshaken, group_to_proto, put_together, rank_to_proto, region_to_proto
from kvferry._wire.reference import format_reference
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry._wire.token import EngineToken
from kvferry._wire.version import OURS_AS_RELAY, OURS_ENCODED
from kvferry.errors import KvferryError
from kvferry.geometry import Group, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.admin_pb2_grpc import AdminStub
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from kvferry_server.domain.engine import Process
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.values import EngineRef
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.node.grpc_server import Server
from kvferry_server.node.guard import Guard
from kvferry_server.node.requests import Requests
from kvferry_server.servicers import add_servicers
from kvferry_server.servicers.access import TRUSTED
from kvferry_server.servicers.relay import Relays
from tests.support.parties import FULL, SECRETS, TIMES, D, FakeClock, P, agent_of, key, rank_geometry, read_id
from tests.support.stubs import KVTransferStub

if TYPE_CHECKING:
    from kvferry.v1.admin_pb2_grpc import AdminAsyncStub
    from kvferry.v1.introspection_pb2_grpc import IntrospectionAsyncStub
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

ADVERTISE = "node.example:7423"
TIMEOUT = 20.0


class ObservedHome(Home):
    """A home that says when it has seen a Watch end: a client that leaves gets no answer to wait for."""

    closed: asyncio.Queue[Process]

    def close_watch(self, process: Process) -> None:
        super().close_watch(process)
        self.closed.put_nowait(process)


class Node:
    """A node server and a client's stubs. Its home is at hand, so that tests see both sides."""

    def __init__(self, home: ObservedHome, clock: FakeClock, channel: grpc.aio.Channel) -> None:
        self.home = home
        self.clock = clock
        self.kv = cast("KVTransferAsyncStub", KVTransferStub(channel))
        self.introspection = cast("IntrospectionAsyncStub", IntrospectionStub(channel))
        self.admin = cast("AdminAsyncStub", AdminStub(channel))
        self._watches: list[Watch] = []
        """Referenced: the older grpcio ends a call that nobody refers to."""

    def pass_by(self, seconds: float) -> None:
        """Time passes and the timers fire."""
        self.clock.pass_by(seconds)
        with self.home.turn():
            pass

    async def leaves(self, watch: Watch) -> None:
        """A process goes, and the server has seen it."""
        watch.cancel()
        await asyncio.wait_for(self.home.closed.get(), TIMEOUT)

    async def open_engine(self, ref: EngineRef = P) -> Watch:
        """Open an engine by its scheduler's Watch."""
        watch = Watch(self, ref)
        self._watches.append(watch)
        assert await watch.kinds(2) == ["opened", "synced"]
        await self.source(*snapshot(), ref=ref)
        return watch

    async def register(
        self, rank: int = 0, ranks: int = 1, ref: EngineRef = P, **changes: Any
    ) -> pb.RegisterCacheResponse:
        return await self.kv.RegisterCache(register_request(rank, ranks, ref, **changes), timeout=TIMEOUT)

    async def source(self, *notifications: pb.Notification, ref: EngineRef = P) -> list[pb.NotificationResult]:
        """Notify in an engine's name."""
        request = pb.NotifyRequest(sender=proto(ref), session_secret=SECRETS[ref], notifications=notifications)
        return list((await self.kv.Notify(request, timeout=TIMEOUT)).results)

    async def reader(self, *notifications: pb.Notification, ref: EngineRef = D) -> list[pb.NotificationResult]:
        request = pb.NotifyRequest(sender=proto(ref), notifications=notifications)
        return list((await self.kv.Notify(request, timeout=TIMEOUT)).results)

    async def publish(
        self, number: int = 1, step: int = 0, *, last: bool = True, **changes: Any
    ) -> pb.NotificationResult:
        return (await self.source(publish_notification(number, step, last=last, **changes)))[0]

    async def handshake(self, request: pb.HandshakeRequest | None = None, **changes: Any) -> Handshaken:
        call = self.kv.Handshake(request or handshake_request(**changes), timeout=TIMEOUT)
        return put_together([message async for message in call])

    async def read(
        self, number: int = 1, lease_id: bytes = b"", next_step: int = 0, **changes: Any
    ) -> pb.ReadBlocksResponse:
        """One answer to a reader; raises the typed error."""
        request = read_request(number, lease_id=lease_id, next_step=next_step, **changes)
        try:
            return await self.kv.ReadBlocks(request, timeout=TIMEOUT)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "test") from None


class Stream:
    """A server stream whose messages a test takes one by one."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def next(self) -> Any:
        """The next message; raises the typed error, or `EOFError` at the end."""
        try:
            message = await asyncio.wait_for(self.call.read(), TIMEOUT)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "test") from None
        if message is grpc.aio.EOF:
            raise EOFError
        return message

    def cancel(self) -> None:
        self.call.cancel()


class Watch(Stream):
    """A Watch."""

    def __init__(
        self,
        node: Node,
        ref: EngineRef = P,
        secret: bytes | None = None,
        role: int = pb.WATCH_ROLE_SCHEDULER,
        **changes: Any,
    ) -> None:
        proof = SECRETS[ref] if secret is None else secret
        request = pb.WatchRequest(engine=proto(ref), session_secret=proof, role=role, **changes)  # type: ignore[arg-type]
        super().__init__(node.kv.Watch(request))

    async def kinds(self, count: int) -> list[str]:
        return [str((await self.next()).WhichOneof("event")) for _ in range(count)]


@asynccontextmanager
async def running(directory: Path, limits: Limits | None = None, *, new: bool = False) -> AsyncIterator[Node]:
    """A node; unless `new`, one that has been up for long."""
    clock = FakeClock()
    home = ObservedHome(clock, TIMES, ADVERTISE, limits)
    home.closed = asyncio.Queue()
    if not new:
        clock.pass_by(1000)
    worker, relays = Worker(), Relays(ADVERTISE, None, anywhere=False)
    guard = Guard(1024, 8192, TRUSTED, Requests(worker, home.time_slices))
    server: Any = Server(SERVER_OPTIONS)  # grpcio's class has no types
    add_servicers(server, home, relays, worker)
    server.offer(guard)
    address = f"unix:{directory / 's'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        # Channels of a process share connections to one address: a node that follows another would get the former's.
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield Node(home, clock, channel)
    finally:
        await server.stop(None)


async def raised(call: Awaitable[object]) -> KvferryError:
    """The typed error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "test")
    except KvferryError as error:
        return error
    raise AssertionError("it was answered")


def proto(ref: EngineRef) -> pb.EngineRef:
    return pb.EngineRef(engine_id=ref.engine_id, incarnation=ref.incarnation)


def register_request(
    rank: int = 0,
    ranks: int = 1,
    ref: EngineRef = P,
    geometry: RankGeometry | None = None,
    groups: tuple[Group, ...] = (FULL,),
    **changes: Any,
) -> pb.RegisterCacheRequest:
    geometry = geometry or rank_geometry(rank, ranks)
    agent = agent_of(geometry, f"{ref.engine_id}/{ref.incarnation.hex()}/{rank}")
    request = pb.RegisterCacheRequest(
        engine=proto(ref),
        session_secret=SECRETS[ref],
        version=OURS_ENCODED,
        num_ranks=ranks,
        identity={"model": "m"},
        groups=[group_to_proto(group) for group in groups],
        rank=rank_to_proto(geometry),
        agent=geometry_pb2.Agent(
            name=agent.name,
            metadata=agent.metadata,
            metadata_sha256=hashlib.sha256(agent.metadata).digest(),
            regions=[region_to_proto(region) for region in agent.regions],
        ),
    )
    for name, value in changes.items():
        setattr(request, name, value)
    if request.relayed_by:
        request.version.relay.CopyFrom(OURS_AS_RELAY)
    return request


def handshake_request(**changes: Any) -> pb.HandshakeRequest:
    given: dict[str, Any] = {
        "engine_id": P.engine_id,
        "incarnation": P.incarnation,
        "reader": proto(D),
        "identity": {"model": "m"},
        "groups": [group_to_proto(FULL)],
        "rank": rank_to_proto(rank_geometry()),
        "reference": engine_reference(),
        "version": OURS_ENCODED,
    }
    return pb.HandshakeRequest(**{**given, **changes})


def publish_notification(number: int = 1, step: int = 0, *, last: bool = True, **changes: Any) -> pb.Notification:
    first = 4 * step
    blocks = pb.GroupBlocks(
        group="full", first_token=16 * first, end_token=16 * (first + 4), run_starts=[1 + first], run_counts=[4]
    )
    given: dict[str, Any] = {"request_id": f"r{number}", "groups": [blocks]}
    return pb.Notification(publish=pb.Publish(publication=number, step=step, last=last, **{**given, **changes}))


def snapshot(*held: pb.Notification, high_water: int = 0) -> list[pb.Notification]:
    """What a home without a record of an engine is told."""
    phases = (pb.RESYNC_PHASE_BEGIN, pb.RESYNC_PHASE_END)
    begin, end = (pb.Notification(resync=pb.Resync(phase=phase, high_water=high_water)) for phase in phases)
    return [begin, *held, end]


def reference(number: int = 1, ref: EngineRef = P, wrong: bytes = b"") -> str:
    """Names a publication, with its key or a wrong one."""
    return format_reference(
        pb.Reference(
            home=ADVERTISE,
            engine_id=ref.engine_id,
            incarnation=ref.incarnation,
            publication=number,
            request_id=f"r{number}",
            key=wrong or key(number, ref),
        )
    )


def engine_reference(ref: EngineRef = P) -> str:
    """Names an engine, with its key."""
    return EngineToken(ref.engine_id, SECRETS[ref], ADVERTISE).engine_reference


def read_request(number: int = 1, reader: EngineRef = D, **changes: Any) -> pb.ReadBlocksRequest:
    given: dict[str, Any] = {"reference": reference(number), "read_id": read_id("read"), "parties": 1}
    return pb.ReadBlocksRequest(reader=proto(reader), version=OURS_ENCODED, **{**given, **changes})


def read_done(lease_id: bytes, *ranks: int, outcome: int = pb.RANK_OUTCOME_DONE) -> pb.Notification:
    reports = [pb.RankReport(rank=rank, outcome=outcome, bytes=7) for rank in ranks]  # type: ignore[arg-type]
    return pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports))


def error_of(result: pb.NotificationResult) -> KvferryError:
    assert result.WhichOneof("kind") == "error", result
    return from_notification_error(result.error)
