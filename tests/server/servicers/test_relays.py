"""Relays: silent homes of one caller take no room from others, and a relay's errors reveal nothing about other
ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from kvferry.errors import InvalidField, KvferryError, LimitReached, RelayLoop, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.admin import service as admin
from kvferry_server.domain.journal import EventLog
from kvferry_server.domain.values import NOBODY, Names
from kvferry_server.node.limits import RESERVED_FILES
from kvferry_server.servicers import limits, relay
from kvferry_server.servicers.relay import Caller, Relays
from tests.support.node_in_process import TIMEOUT, proto, register_request
from tests.support.node_servers import free_port
from tests.support.parties import SECRETS, FakeClock, P

OWN = "127.0.0.1:7611"
HOSTILE, HONEST = Caller("203.0.113.9", NOBODY), Caller("192.0.2.7", NOBODY)


MOST = 256  # Relayed calls in these tests


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Relays:
    monkeypatch.setattr(relay, "MAX_RELAYED_CALLS", MOST)
    return Relays(OWN, None, anywhere=False, events=EventLog(FakeClock()))


@pytest.fixture
def silent() -> Iterator[Any]:
    """Makes homes whose connections are never accepted."""
    with ExitStack() as stack:

        def make() -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield make


def watch(relays: Relays, home: str, caller: Caller) -> asyncio.Task[pb.WatchResponse]:
    """The first message of a rank's Watch."""
    request = pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_RANK, home=home)
    return asyncio.create_task(_first(relays, request, caller))


async def _first(relays: Relays, request: pb.WatchRequest, caller: Caller) -> pb.WatchResponse:
    return await anext(relays.watch(request, caller))


async def error_of(call: Awaitable[object]) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(call, TIMEOUT)
    return caught.value


async def ended(tasks: list[asyncio.Task[pb.WatchResponse]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_connections_of_relayed_calls_take_no_files_from_others() -> None:
    """A hostile caller that names silent homes would otherwise use up the files of the process."""
    for_others = 64 + admin.MAX_CONNECTIONS
    assert limits.MAX_RELAYED_CALLS + limits.MAX_RELAYED_DECLINES + for_others <= RESERVED_FILES


@pytest.mark.parametrize("names", [NOBODY, frozenset({b"spiffe://fleet/one"})], ids=["a host", "an identity"])
async def test_watches_of_silent_homes_take_no_room_from_others(relays: Relays, silent: Any, names: Names) -> None:
    def hostile(number: int) -> Caller:
        # One host, or one identity on many hosts.
        return HOSTILE if not names else Caller(f"203.0.113.{number}", names)

    watches = [watch(relays, silent(), hostile(number)) for number in range(MOST)]
    registers = asyncio.create_task(error_of(relays.register_cache(register_request(home=silent()), hostile(MOST))))
    await asyncio.wait([registers])
    assert isinstance(registers.result(), LimitReached)
    assert relays.num_homes == MOST // 2
    honest = watch(relays, silent(), HONEST)
    await asyncio.sleep(0)
    assert relays.num_homes == MOST // 2 + 1
    assert not honest.done()
    await ended([*watches, honest])
    await relays.close()
    assert relays.num_homes == 0


async def test_watch_at_a_silent_home_ends(relays: Relays, silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "OPEN_TIMEOUT", 0.05)
    assert isinstance(await error_of(watch(relays, silent(), HOSTILE)), Unreachable)
    await relays.close()
    assert relays.num_homes == 0


async def test_a_home_is_one_home_however_its_address_is_written(relays: Relays, silent: Any) -> None:
    port = free_port()
    texts = [f"127.0.0.1:{port}", f"127.0.0.1:{port:05}", f"LOCALHOST:{port}", f"localhost:{port}"]
    texts += [f"[::1]:{port}", f"[0:0:0:0:0:0:0:1]:{port:05}"]
    watches = [watch(relays, text, HONEST) for text in texts]
    await asyncio.sleep(0)
    assert relays.num_homes == 3
    await ended(watches)
    await relays.close()
    assert relays.num_homes == 0


@pytest.mark.parametrize("home", ["127.0.0.1:07611", "localhost:7611", "LocalHost:07611", OWN])
def test_own_address_is_no_other_home_however_it_is_written(relays: Relays, home: str) -> None:
    assert not relays.applies(home, "")
    assert not relays.applies(home, "10.0.0.1:7423")


def test_address_that_differs_is_another_home(relays: Relays) -> None:
    assert relays.applies("localhost:7612", "")
    with pytest.raises(RelayLoop):
        relays.applies("127.0.0.2:7611", "10.0.0.1:7423")
    with pytest.raises(InvalidField):
        relays.applies("127.0.0.1:" + "0" * 200 + "1", "")


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A service that is no node server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_relay_gives_the_same_error_for_closed_ports_silent_ports_and_other_services(
    relays: Relays, silent: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("OPEN_TIMEOUT", "REGISTER_TIMEOUT"):
        monkeypatch.setattr(relay, name, 1.0)
    other_grpc = grpc.aio.server()
    grpc_port = other_grpc.add_insecure_port("127.0.0.1:0")
    await other_grpc.start()
    async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as http, answering(b"") as closing:
        homes = [f"127.0.0.1:{free_port()}", silent(), http, closing, f"127.0.0.1:{grpc_port}"]
        told = set()
        for home in homes:
            registering = relays.register_cache(register_request(home=home), HOSTILE)
            declining = relays.decline(home, [pb.Decline(reference="kvf1.x")], 1.0, HOSTILE)
            for call in (watch(relays, home, HOSTILE), registering, declining):
                error = await error_of(call)
                told.add((type(error), error.message.replace(home, "HOME"), error.retry_after, tuple(error.values)))
    assert len(told) == 1, told
    [(kind, message, _, _)] = told
    assert kind is Unreachable
    assert OWN in message
    # The server's own log says more.
    problems = {record.problem for record in caplog.records if hasattr(record, "problem")}
    assert any("onnection refused" in problem for problem in problems)
    assert len(problems) >= 3
    await other_grpc.stop(0)
    await relays.close()
