"""A decline at any node server is sent on to the home that its reference names, once, and only to homes that may be
dialled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from kvferry._wire.reference import format_reference, parse_reference, router_reference
from kvferry._wire.status import from_notification_error
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import (
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    KvferryError,
    LimitReached,
    RelayLoop,
    Unreachable,
    WrongKey,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import add_KVTransferServicer_to_server
from kvferry_server.domain.values import NOBODY
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from kvferry_server.servicers import relay
from kvferry_server.servicers.limits import MAX_RELAYED_DECLINES
from kvferry_server.servicers.relay import Caller
from tests.support.node_in_process import TIMEOUT, proto, publish_notification, register_request, snapshot
from tests.support.node_servers import free_port
from tests.support.parties import P2, SECRETS, P
from tests.support.stubs import KVTransferStub


async def notify(address: str, *references: str, relayed_by: str = "") -> list[KvferryError | None]:
    """Decline at a node server; return the error of each decline, None for success."""
    declines = [pb.Decline(reference=reference, relayed_by=relayed_by) for reference in references]
    request = pb.NotifyRequest(notifications=[pb.Notification(decline=decline) for decline in declines])
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = KVTransferStub(channel)
        results = (await stub.Notify(request, timeout=TIMEOUT)).results
    kinds = {result.WhichOneof("kind") for result in results}
    assert kinds <= {"done", "error"}
    return [from_notification_error(result.error) if result.HasField("error") else None for result in results]


class Stage:
    """A home with engine P, which has published, and another node server."""

    home: str
    other: str
    references: list[str]
    watch: Any

    async def released(self) -> tuple[int, int]:
        """Return the source's next event."""
        released = (await self.watch.read()).released
        return released.publication, released.outcome


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage()
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(2):
            server = NodeServer(configure(listen="127.0.0.1:0", unix="", drain=0, engine_ttl=0.01))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            servers.append(server)
        made.home, made.other = servers[0].advertise, servers[1].advertise
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(made.home))
        stub: Any = KVTransferStub(channel)
        request = pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER)
        made.watch = stub.Watch(request)
        for _ in range(2):
            await made.watch.read()
        await stub.RegisterCache(register_request(), timeout=TIMEOUT)
        said = [*snapshot(), *map(publish_notification, (1, 2, 3))]
        sent = pb.NotifyRequest(sender=proto(P), session_secret=SECRETS[P], notifications=said)
        results = (await stub.Notify(sent, timeout=TIMEOUT)).results
        made.references = [result.published.reference for result in results[2:]]
        yield made
        made.watch.cancel()


def changed(reference: str, **changes: Any) -> str:
    """A reference with other fields."""
    message = parse_reference(reference)
    for name, value in changes.items():
        setattr(message, name, value)
    return format_reference(message)


async def test_decline_is_accepted_by_any_node_server(stage: Stage) -> None:
    first, second, third = stage.references
    # A batch: each decline has its own result, in order.
    errors = await notify(stage.other, first, "kvf1.nonsense", changed(second, key=bytes(16)), third)
    assert [type(error).__name__ for error in errors] == ["NoneType", "BadReference", "WrongKey", "NoneType"]
    assert {await stage.released() for _ in range(2)} == {
        (1, pb.RELEASE_OUTCOME_DECLINED),
        (3, pb.RELEASE_OUTCOME_DECLINED),
    }
    # Again, at the home and elsewhere: nothing changes.
    assert await notify(stage.home, first) == await notify(stage.other, first) == [None]
    assert isinstance(errors[2], WrongKey)


async def test_a_decline_by_a_reference_with_marks_is_sent_on(stage: Stage) -> None:
    marked = parse_reference(stage.references[0])
    marked.marks.add(end=300, digest=b"d" * 16)
    assert await notify(stage.other, format_reference(marked)) == [None]
    assert await stage.released() == (1, pb.RELEASE_OUTCOME_DECLINED)


async def test_home_finds_its_engines_under_any_address(stage: Stage) -> None:
    assert await notify(stage.home, changed(stage.references[0], home="203.0.113.9:7423")) == [None]
    assert (await stage.released())[0] == 1


async def test_a_decline_is_sent_on_once_and_only_to_homes_that_may_be_dialled(stage: Stage) -> None:
    reference = stage.references[0]
    (loop,) = await notify(stage.other, reference, relayed_by="node.example:7423")
    assert isinstance(loop, RelayLoop)
    # The home in this reference is the other server itself, which has no such engine.
    (gone,) = await notify(stage.home, changed(reference, home=stage.other, engine_id="nobody"))
    assert isinstance(gone, (EngineUnknown, HomeRecovering))
    for home in ("203.0.113.9:7423", "unix:/run/kvferry/node.sock"):
        (refused,) = await notify(stage.other, changed(reference, home=home))
        assert isinstance(refused, InvalidField)
        assert refused.values["field"] == "home"
    (unreachable,) = await notify(stage.other, changed(reference, home=f"127.0.0.1:{free_port()}"))
    assert isinstance(unreachable, Unreachable)
    (malformed,) = await notify(stage.other, reference, relayed_by="x" * 257)
    assert isinstance(malformed, InvalidField)


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [pb.NotificationResult()],
        [pb.NotificationResult(published=pb.Published(reference="kvf1.x"))],
        [pb.NotificationResult(error=pb.NotificationError(code=5, message="x" * 100_000))],
        [pb.NotificationResult(done=pb.Acknowledged())] * 2,
    ],
    ids=["none", "empty", "another kind", "huge", "too many"],
)
async def test_answers_of_a_strange_home_are_not_passed_on(stage: Stage, answers: list[pb.NotificationResult]) -> None:
    class Strange:
        def __getattr__(self, name: str) -> object:
            async def notify(request: pb.NotifyRequest, context: object) -> pb.NotifyResponse:
                return pb.NotifyResponse(results=answers, version=OURS_ENCODED)

            return notify

    server = grpc.aio.server()
    add_KVTransferServicer_to_server(Strange(), server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (error,) = await notify(stage.other, changed(stage.references[0], home=f"127.0.0.1:{port}"))
    assert isinstance(error, Unreachable)
    assert len(str(error)) < 500
    await server.stop(0)


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller's declines get half of these connections."""
    monkeypatch.setattr(relay, "MAX_RELAYED_DECLINES", 4)


@pytest.mark.usefixtures("few_places")
async def test_declines_leave_room_for_ranks_that_register(stage: Stage) -> None:
    homes = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    errors = await notify(stage.other, *(changed(stage.references[0], home=home) for home in homes))
    assert sorted(type(error).__name__ for error in errors) == ["LimitReached"] * 2 + ["Unreachable"] * 2
    # No connection stays.
    assert await notify(stage.other, stage.references[0]) == [None]


async def test_homes_that_do_not_answer_take_no_room_from_the_declines_of_other_hosts() -> None:
    """One caller names as many silent homes as it can; a router on another host still gets its decline through."""
    with ExitStack() as stack:

        def silent() -> str:
            """A home whose connections are never accepted."""
            return f"127.0.0.1:{stack.enter_context(socket.create_server(('127.0.0.1', 0))).getsockname()[1]}"

        relays = relay.Relays("127.0.0.1:1", None, anywhere=False)
        homes = [silent() for _ in range(MAX_RELAYED_DECLINES + 2)]

        def decline(home: str, host: str) -> asyncio.Task[Any]:
            return asyncio.create_task(
                relays.decline(home, [pb.Decline(reference="kvf1.x")], 60.0, Caller(host, NOBODY))
            )

        for _ in range(2):
            hostile = [decline(home, "203.0.113.9") for home in homes[:-1]]
            honest = decline(homes[-1], "192.0.2.7")
            # Refusals come at once, without any wait.
            await asyncio.wait(hostile, return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in (*hostile, honest) if not task.done()}
            done = {*hostile, honest} - waiting
            assert len(done) > MAX_RELAYED_DECLINES // 2
            assert {type(task.exception()) for task in done} == {LimitReached}
            assert honest in waiting
            assert relays.num_homes == len(waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            # All of the budget was given back.
            assert relays.num_homes == 0


@pytest.mark.parametrize("published", [False, True])
async def test_a_routers_reference_is_declined_at_the_home_that_it_names(stage: Stage, *, published: bool) -> None:
    """The reference names no incarnation, and the node server called has an engine of the same name, maybe with a
    publication of the same name."""
    key, namesake = b"k" * 16, proto(P2)
    async with AsyncExitStack() as stack:
        home, other = [
            cast("Any", KVTransferStub(await stack.enter_async_context(grpc.aio.insecure_channel(address))))
            for address in (stage.home, stage.other)
        ]
        watch = other.Watch(pb.WatchRequest(engine=namesake, session_secret=SECRETS[P2], role=pb.WATCH_ROLE_SCHEDULER))
        for _ in range(2):
            await watch.read()
        if published:
            await other.RegisterCache(register_request(ref=P2), timeout=TIMEOUT)
            own = [*snapshot(), publish_notification(1, router_key="room", key=b"n" * 16)]
            stranger = pb.NotifyRequest(sender=namesake, session_secret=SECRETS[P2], notifications=own)
            results = (await other.Notify(stranger, timeout=TIMEOUT)).results
            assert results[-1].HasField("published")
        said = [publish_notification(4, router_key="room", key=key)]
        sent = pb.NotifyRequest(sender=proto(P), session_secret=SECRETS[P], notifications=said)
        await home.Notify(sent, timeout=TIMEOUT)
        reference = router_reference(stage.home, P.engine_id, router_key="room", key=key)
        assert await notify(stage.other, reference) == [None]
        assert (await stage.released())[0] == 4
        watch.cancel()
