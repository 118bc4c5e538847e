"""An engine that stops in order frees its name at once, and takes nothing from its readers; one that dies does not."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry._clock import now
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.token import engine_ref
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import EngineIdInUse, EngineUnknown, PeerRestarted, TransferExpired, Unavailable, WrongSession
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl
from tests.support.identifiers import unique_id
from tests.support.loaded_processes import LOADED
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

AXES = ("kv", "block", "head", "token", "content")
ENGINE_TTL, WITHIN = 8.0, 6.0
"""Seconds until a home finds an engine dead, and in which the next start succeeds."""
SOON = 60.0


def spec(name: str) -> EngineSpec:
    return EngineSpec(name, (Group("full", block_tokens=16, num_blocks=8),))


def memory() -> dict[str, Any]:
    return {"layer": np.zeros((2, 8, 1, 16, 4), np.float32)}


def open_again(client: Client) -> Exception | None:
    """Why an engine that is open is not opened a second time."""
    try:
        # Closed at once: a home has room for so many engines.
        client.open_engine(spec("probe"), timeout=0.2).close()
    except (EngineIdInUse, Unavailable) as error:
        return error
    return None


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fabric, NodeServerProcess]]:
    """A fabric and a node server that have been up for long: they take no second incarnation of an engine."""
    folder = tmp_path_factory.mktemp("home")
    with Fabric(engine_ttl=ENGINE_TTL) as fabric, NodeServerProcess(folder, tcp=True, engine_ttl=ENGINE_TTL) as server:
        first = fabric.client()
        first.open_engine(spec("probe"))
        second = fabric.client()
        until(lambda: isinstance(open_again(second), EngineIdInUse))
        server.settled()
        yield fabric, server


@pytest.fixture
def fabric(homes: tuple[Fabric, NodeServerProcess]) -> Fabric:
    return homes[0]


@pytest.fixture
def server(homes: tuple[Fabric, NodeServerProcess]) -> NodeServerProcess:
    return homes[1]


def test_a_closed_engine_starts_again_at_once(fabric: Fabric) -> None:
    client, other = fabric.client(), fabric.client()
    for opener in (client, client, other, client):
        session = opener.open_engine(spec("again"), timeout=WITHIN)
        with pytest.raises((EngineIdInUse, Unavailable)):
            fabric.client().open_engine(spec("again"), timeout=0.2)
        session.close()
        session.close()
    # The same with a port, and a client that is closed instead of its session.
    SchedulerPort(client, spec("again"), timeout=WITHIN).close()
    other.open_engine(spec("again"), timeout=WITHIN)
    other.close()
    fabric.client().open_engine(spec("again"), timeout=WITHIN)


def test_read_goes_on_when_its_source_stops_and_the_next_start_gets_its_end(fabric: Fabric) -> None:
    source, reader = fabric.client(), fabric.client(optimistic=False)
    scheduler, worker = SchedulerPort(source, spec("p")), WorkerPort(source, spec("p"))
    tensors, mine = memory(), memory()
    tensors["layer"][:, 1] = 7
    worker.register(tensors, axes=AXES)
    publication = scheduler.publish("request", {"full": Blocks([1])})
    cache = reader.register_cache(spec("d"), tensors=mine, axes=AXES)
    with fabric.hold_reads() as held:
        read = cache.read(publication.reference, {"full": Blocks([2])}, timeout=SOON)
        held.wait()
        scheduler.close()
        again = fabric.client().register_cache(spec("p"), tensors=memory(), axes=AXES, timeout=WITHIN)
        # The lease is live, and so the memory is not to be changed.
        assert again.reuse_after > 0
        held.release()
        assert read.result(SOON).confirmed
    assert np.all(mine["layer"][:, 2] == 7)
    late = cache.read(publication.reference, {"full": Blocks([3])}, timeout=SOON)
    assert isinstance(late.exception(SOON), PeerRestarted)
    worker.close()


def test_read_goes_on_when_a_renewal_reports_a_stopped_source() -> None:
    with Fabric(ttl=9.0, max_ttl=9.0) as fabric:
        source, tensors, mine = fabric.client(), memory(), memory()
        scheduler, worker = SchedulerPort(source, spec("p")), WorkerPort(source, spec("p"))
        tensors["layer"][:, 1] = 7
        worker.register(tensors, axes=AXES)
        reader = fabric.client(optimistic=False).register_cache(spec("d"), tensors=mine, axes=AXES)
        publication = scheduler.publish("request", {"full": Blocks([1])})
        with fabric.hold_reads() as held:
            read = reader.read(publication.reference, {"full": Blocks([2])}, timeout=SOON)
            held.wait()
            scheduler.close()
            told = now() + 9.0 / 3 + 1.0
            until(lambda: now() > told)
            held.release()
            assert read.result(SOON).confirmed
        assert np.all(mine["layer"][:, 2] == 7)
        worker.close()


def test_successor_that_waits_for_its_memory_changes_no_bytes_of_a_read() -> None:
    """The next start takes over the same memory, which is its own after `reuse_after`."""
    with Fabric(ttl=2.0, max_ttl=2.0, engine_ttl=1.0) as fabric:
        source, tensors, mine = fabric.client(), memory(), memory()
        scheduler, worker = SchedulerPort(source, spec("p")), WorkerPort(source, spec("p"))
        tensors["layer"][:, 1] = 7
        worker.register(tensors, axes=AXES)
        reader = fabric.client(optimistic=False).register_cache(spec("d"), tensors=mine, axes=AXES)
        # A home that has just started lets nobody use memory that may be leased.
        up = now() + 2.0
        until(lambda: now() > up)
        publication = scheduler.publish("request", {"full": Blocks([1])})
        with fabric.hold_reads() as held:
            read = reader.read(publication.reference, {"full": Blocks([2])}, timeout=SOON)
            held.wait()
            scheduler.close()
            again = fabric.client().register_cache(spec("p"), tensors=tensors, axes=AXES, timeout=WITHIN)
            its_own = now() + again.reuse_after
            until(lambda: now() >= its_own)
            tensors["layer"][:] = 9
            held.release()
            assert isinstance(read.exception(SOON), TransferExpired)
        worker.close()


def test_session_secret_is_needed_to_retire_an_engine_and_a_late_notice_harms_no_successor(fabric: Fabric) -> None:
    client, name = fabric.client(), "secret"
    session = client.open_engine(spec(name))
    control = BlockingControl(fabric.address, control=client._homes.own)
    token, stranger = session.token, new_session_secret()

    def retire(sender: pb.EngineRef, secret: bytes) -> None:
        told = [pb.Notification(retire=pb.Retire())]
        control.notify_one(pb.NotifyRequest(sender=sender, session_secret=secret, notifications=told))

    with pytest.raises(WrongSession):
        retire(engine_ref(token), stranger)
    with pytest.raises((EngineUnknown, PeerRestarted)):
        retire(pb.EngineRef(engine_id=name, incarnation=incarnation_of(stranger)), stranger)
    client.register_cache(spec(name), tensors=memory(), axes=AXES)
    session.publish("lives", {"full": Blocks([1])})
    session.close()
    successor, cache = fabric.client(), memory()
    registered = successor.register_cache(spec(name), tensors=cache, axes=AXES, timeout=WITHIN)
    with pytest.raises(PeerRestarted):
        retire(engine_ref(token), token.session_secret)
    request = pb.WatchRequest(
        engine=engine_ref(token), session_secret=token.session_secret, role=pb.WATCH_ROLE_SCHEDULER
    )
    with pytest.raises(PeerRestarted):
        next(control.watch(request))
    assert registered.session.publish("lives", {"full": Blocks([1])}).number == 1


def _start(address: str, name: str, pipe: Connection) -> None:
    with Client(address) as client:
        client.open_engine(spec(name))
        pipe.send("open")
        pipe.recv()


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_a_stopped_engine_starts_again_at_once_in_another_process_and_a_killed_one_later(
    server: NodeServerProcess, how: str
) -> None:
    name = unique_id("engine")
    mine, theirs = LOADED.Pipe()
    first = LOADED.Process(target=_start, args=(server.address, name, theirs), daemon=True)
    first.start()
    assert mine.poll(SOON)
    mine.recv()
    if how == "in order":
        mine.send("stop")
    else:
        first.kill()
    first.join(SOON)
    with Client(server.address) as client:
        if how == "in order":
            client.open_engine(spec(name), timeout=WITHIN)
        else:
            with pytest.raises(EngineIdInUse):
                client.open_engine(spec(name), timeout=1.0)
            client.open_engine(spec(name), timeout=SOON)
