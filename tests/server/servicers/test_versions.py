"""Versions: every caller states its contract, and revisions that cannot work together are refused at that call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from kvferry._wire import version
from kvferry._wire.status import from_rpc_error, to_status
from kvferry._wire.version import OURS, OURS_AS_RELAY, OURS_ENCODED, Version
from kvferry.errors import ContractDiffers, KvferryError, Refused
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1 import kv_transfer_pb2_grpc
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from tests.support.node_in_process import (
    TIMEOUT,
    Node,
    handshake_request,
    proto,
    read_request,
    register_request,
    running,
)
from tests.support.parties import SECRETS, P

WATCH = pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER)
FIRST_CALLS: dict[str, Callable[[], Any]] = {
    "Watch": lambda: WATCH,
    "RegisterCache": register_request,
    "Handshake": handshake_request,
    "ReadBlocks": read_request,
    "Notify": lambda: pb.NotifyRequest(notifications=[pb.Notification(renew=pb.Renew(lease_id=b"l" * 16))]),
}
"""All calls that may be a peer's first."""


class Raw:
    """A caller with the version that a test gives."""

    def __init__(self, node: Node, channel: grpc.aio.Channel) -> None:
        self.node = node
        self._stub: Any = kv_transfer_pb2_grpc.KVTransferStub(channel)

    async def first(self, call: str, said: pb.Version | None = None, request: Any = None) -> Any:
        """Return the first answer to a call; raise the typed error."""
        asked = type(made := request or FIRST_CALLS[call]())()
        asked.CopyFrom(made)
        asked.ClearField("version")
        if said is not None:
            asked.version.CopyFrom(said)
        answer = getattr(self._stub, call)(asked, timeout=TIMEOUT)
        try:
            if call in ("Watch", "Handshake"):
                return await answer.read()
            return await answer
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "test") from None
        finally:
            answer.cancel()

    async def refusal(self, call: str, said: pb.Version | None = None, request: Any = None) -> KvferryError | None:
        """Return the error of a call, None if it is answered."""
        try:
            await self.first(call, said, request)
        except KvferryError as error:
            return error
        return None


@pytest_asyncio.fixture
async def raw(tmp_path: Path) -> AsyncIterator[Raw]:
    async with running(tmp_path) as node, grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
        await node.open_engine()
        await node.register()
        await node.publish()
        yield Raw(node, channel)


@pytest.mark.parametrize("call", FIRST_CALLS)
async def test_a_caller_from_before_versions_is_refused_at_its_first_call(raw: Raw, call: str) -> None:
    error = await raw.refusal(call)
    assert isinstance(error, ContractDiffers)
    assert not error.retryable
    assert error.values == {
        "party": "the caller",
        "party_revision": "0",
        "party_release": "",
        "other": "this node server",
        "other_revision": str(version.CONTRACT_REVISION),
        "other_release": OURS.release,
    }
    assert f"revision {OURS.revision} of the contract (release {OURS.release})" in error.message
    assert "Upgrade the caller" in error.message


@pytest.mark.parametrize("call", FIRST_CALLS)
async def test_caller_in_another_language_may_state_the_revision_alone(raw: Raw, call: str) -> None:
    answer = await raw.first(call, pb.Version(contract_revision=2))
    assert answer.version == OURS_ENCODED


@pytest.mark.parametrize("call", FIRST_CALLS)
async def test_a_later_release_decides_whether_it_works_with_this_one(raw: Raw, call: str) -> None:
    later = pb.Version(contract_revision=OURS.revision + 1, oldest_revision=OURS.revision, release="later")
    assert not isinstance(await raw.refusal(call, later), ContractDiffers)
    later.oldest_revision = OURS.revision + 1
    error = await raw.refusal(call, later)
    assert isinstance(error, ContractDiffers)
    assert (error.values["party_release"], error.values["party_revision"]) == ("later", str(OURS.revision + 1))
    assert "Upgrade this node server" in error.message


async def test_release_name_of_a_caller_is_cut_and_on_one_line(raw: Raw) -> None:
    error = await raw.refusal("Notify", pb.Version(contract_revision=1, release="x\n\x1b[31m" + "é" * 1000))
    assert isinstance(error, ContractDiffers)
    assert error.message.isprintable()
    assert len(error.message) < 700


async def test_a_reader_is_refused_by_a_source_that_it_does_not_work_with(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The home works with both engines, which do not work with each other.
    monkeypatch.setattr(version, "OURS", Version(3, 2, "0.3.0"))
    reader = pb.Version(contract_revision=4, oldest_revision=3, release="0.4.0")
    error = await raw.refusal("Handshake", reader)
    assert isinstance(error, ContractDiffers)
    assert (error.values["party"], error.values["party_release"]) == ("the reader", "0.4.0")
    assert (error.values["other"], error.values["other_release"]) == (f"the source {P.engine_id!r}", OURS.release)
    reader.oldest_revision = 2
    answer = await raw.first("Handshake", reader)
    assert answer.source_version == OURS_ENCODED


class Relayed:
    """A home, and a node server that relays to it."""

    def __init__(self, home: str, relay: str) -> None:
        self.home, self.relay = home, relay


@pytest_asyncio.fixture
async def relayed() -> AsyncIterator[Relayed]:
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(2):
            server = NodeServer(configure(listen="127.0.0.1:0", unix="", drain=0))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            servers.append(server)
        yield Relayed(servers[0].advertise, servers[1].advertise)


async def test_versions_of_all_three_participants_of_a_relayed_call_are_stated(relayed: Relayed) -> None:
    async with grpc.aio.insecure_channel(relayed.home) as home, grpc.aio.insecure_channel(relayed.relay) as relay:
        at_home = Raw(cast(Node, None), home)
        stub: Any = kv_transfer_pb2_grpc.KVTransferStub(home)
        opening = pb.WatchRequest()
        opening.CopyFrom(WATCH)
        opening.version.CopyFrom(OURS_ENCODED)
        scheduler = stub.Watch(opening)
        await scheduler.read()
        rank = pb.Version(contract_revision=2, release="the rank")
        watching = pb.WatchRequest(
            engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_RANK, home=relayed.home
        )
        calls: dict[str, Any] = {"RegisterCache": register_request(), "Watch": watching}
        calls["RegisterCache"].home = relayed.home
        through = Raw(cast(Node, None), relay)
        for call, request in calls.items():
            # The relay refuses an older rank before it calls the home.
            error = await through.refusal(call, None, request)
            assert isinstance(error, ContractDiffers)
            assert error.values["party"] == "the caller"
            answer = await through.first(call, rank, request)
            assert answer.version.contract_revision == OURS.revision
            assert answer.version.relay == OURS_AS_RELAY
            # An older relay passes on fields that it does not know.
            marked = type(request)()
            marked.CopyFrom(request)
            marked.relayed_by = relayed.relay
            marked.home = ""
            error = await at_home.refusal(call, rank, marked)
            assert isinstance(error, ContractDiffers)
            assert error.values["party"] == "the relay"
        scheduler.cancel()


async def test_a_relay_passes_on_a_refusal_whose_reason_it_does_not_know(relayed: Relayed) -> None:
    refused = Refused("this is why")
    refused.reason = "OF_A_LATER_RELEASE"
    status = to_status(refused)

    class Later:
        async def refuse(self, request: Any, context: Any) -> Any:
            await context.abort(*status)

        def __getattr__(self, method: str) -> Any:
            return self.refuse

    home = grpc.aio.server()
    kv_transfer_pb2_grpc.add_KVTransferServicer_to_server(cast(Any, Later()), home)
    address = f"127.0.0.1:{home.add_insecure_port('127.0.0.1:0')}"
    await home.start()
    watching = pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_RANK, home=address)
    try:
        async with grpc.aio.insecure_channel(relayed.relay) as channel:
            through = Raw(cast(Node, None), channel)
            for call, request in (("RegisterCache", register_request(home=address)), ("Watch", watching)):
                error = await through.refusal(call, OURS_ENCODED, request)
                # Not an internal error, which a rank's Watch would wait out.
                assert type(error) is Refused
                assert (error.message, error.retryable) == ("this is why", False)
    finally:
        await home.stop(0)
