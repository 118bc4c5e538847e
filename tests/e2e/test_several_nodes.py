"""An engine whose ranks are on two nodes: each talks to its own node server only, and readers to the home only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Blocks, Client, EngineSpec, KvferryError
from kvferry._clock import now
from kvferry._session import EngineSession
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto
from kvferry._wire.token import engine_ref
from kvferry._wire.version import OURS_AS_RELAY
from kvferry.errors import EngineIncomplete, InvalidField, PeerRestarted, RelayLoop, Unreachable
from kvferry.geometry import RankGeometry
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl
from tests.support.caches import Memory, Model, expect, kv, shards, write
from tests.support.engines import RankProcess
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess, free_port

MODEL = Model()
TOKENS = 40
BLOCKS = [3, 4, 9]
INTO = [1, 2, 5]


class Spanning:
    """A source with rank 0 at its home and rank 1 at another node, and a reader at a third of one rank."""

    def __init__(self, folder: Path) -> None:
        self.home, self.other = (
            NodeServerProcess(folder / name, tcp=True, engine_ttl=1, ttl=3, max_ttl=3).start()
            for name in ("home", "other")
        )
        self.spec = EngineSpec(unique_id("prefill"), (MODEL.group(),), num_ranks=2)
        self.client = Client(self.home.address)
        self.session: EngineSession = self.client.open_engine(self.spec)
        self.memories = [Memory(MODEL, units, folder / f"s{rank}") for rank, units in enumerate(shards(MODEL.heads, 2))]
        self.kv = kv(MODEL, 7, TOKENS)
        for memory in self.memories:
            write(memory, self.kv, BLOCKS)
        token = str(self.session.token)
        self.ranks = [
            RankProcess(server.address, self.spec, rank, memory, token, serve=True)
            for rank, (server, memory) in enumerate(zip((self.home, self.other), self.memories, strict=True))
        ]
        self.into = Memory(MODEL, shards(MODEL.heads, 1)[0], folder / "d0")
        reader = EngineSpec(unique_id("decode"), (MODEL.group(),))
        self.reading = Client(self.other.address)
        self.reader = RankProcess(
            self.other.address,
            reader,
            0,
            self.into,
            str(self.reading.open_engine(reader).token),
            serve=False,
        )
        for rank in (*self.ranks, self.reader):
            rank.ready()

    def read(self, timeout: float = 30.0) -> None:
        """Publish and read; every byte is looked at."""
        publication = self.session.publish("r", {"full": Blocks(BLOCKS, end_token=TOKENS)}, timeout=20)
        self.reader.read(publication.reference, INTO, (0, TOKENS), timeout=timeout)
        assert (self.into.cells == expect(self.into, self.kv, INTO, (0, TOKENS))).all()
        self.into.cells[:] = 0xA5
        # Where a restarted home was told of it in the snapshot, its release waits for a max_ttl: its predecessor may
        # have granted leases on it.
        assert [release.publication for release in self.session.released(30)] == [publication.number]

    def incomplete(self) -> EngineIncomplete:
        """What a reader is told, as soon as the home has noticed."""
        request = pb.HandshakeRequest(
            engine_id=self.spec.engine_id, reader=pb.EngineRef(engine_id="x", incarnation=b"x" * 16)
        )
        request.groups.append(group_to_proto(MODEL.group()))
        request.rank.CopyFrom(rank_to_proto(RankGeometry(0, tuple(MODEL.planes(shards(MODEL.heads, 1)[0], 1 << 20)))))
        control, deadline = BlockingControl(self.home.address), now() + 30
        while now() < deadline:
            try:
                control.handshake(request, 5)
            except EngineIncomplete as error:
                control.close()
                return error
        raise TimeoutError("the home never noticed")

    def close(self) -> None:
        for rank in (*self.ranks, self.reader):
            rank.close()
        self.client.close()
        self.reading.close()
        for server in (self.home, self.other):
            server.__exit__(None, None, None)


@pytest.fixture
def spanning(tmp_path: Path) -> Iterator[Spanning]:
    made = Spanning(tmp_path)
    yield made
    made.close()


def test_one_address_serves_the_whole_engine(spanning: Spanning) -> None:
    spanning.read()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["home", "other"])
def test_either_node_server_may_restart(spanning: Spanning, which: str) -> None:
    server: NodeServerProcess = getattr(spanning, which)
    server.stop()
    server.start()
    # Until the engine is whole again a read is told to wait, and does.
    spanning.read()


def test_a_rank_that_died_behind_another_node_is_told_from_its_node(spanning: Spanning) -> None:
    spanning.ranks[1].process.kill()
    error = spanning.incomplete()
    assert error.values["missing_ranks"] == "1"
    assert error.values["nodes"] == spanning.other.address
    assert "lost_nodes" not in error.values


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_was_lost_is_named_as_lost(spanning: Spanning, how: signal.Signals) -> None:
    spanning.other.stop(how)
    error = spanning.incomplete()
    assert error.values["lost_nodes"] == spanning.other.address
    assert f"nodes lost: {spanning.other.address}" in str(error)


def test_what_was_lost_is_told_to_the_scheduler(spanning: Spanning, caplog: pytest.LogCaptureFixture) -> None:
    spanning.other.stop(signal.SIGKILL)
    spanning.incomplete()
    expected = f"rank 1 of node {spanning.other.address} is gone: its node was lost"
    deadline = now() + 30
    while not any(expected in record.getMessage() for record in caplog.records) and now() < deadline:
        spanning.session.released(0.05)
    assert expected in caplog.text


def failure(address: str, request: pb.RegisterCacheRequest | pb.WatchRequest) -> KvferryError:
    control = BlockingControl(address)
    try:
        if isinstance(request, pb.WatchRequest):
            next(control.watch(request))
        else:
            control.register_cache(request, 10)
    except KvferryError as error:
        return error
    finally:
        control.close()
    raise AssertionError("it was not refused")


def registration(spanning: Spanning, **changes: Any) -> pb.RegisterCacheRequest:
    token = spanning.session.token
    request = pb.RegisterCacheRequest(
        engine=engine_ref(token),
        session_secret=token.session_secret,
        num_ranks=2,
        groups=[group_to_proto(MODEL.group())],
        rank=rank_to_proto(RankGeometry(1, tuple(MODEL.planes(shards(MODEL.heads, 2)[1], 1 << 20)))),
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_what_cannot_be_relayed_is_refused_and_harms_nobody(spanning: Spanning) -> None:
    home, other = spanning.home.address, spanning.other.address
    token = spanning.session.token
    looping = registration(spanning, home=home, relayed_by="third:1")
    looping.version.relay.CopyFrom(OURS_AS_RELAY)
    assert isinstance(failure(other, looping), RelayLoop)
    watch = pb.WatchRequest(engine=engine_ref(token), session_secret=token.session_secret, role=pb.WATCH_ROLE_SCHEDULER)
    watch.home = home
    assert isinstance(failure(other, watch), InvalidField)
    nobody = f"127.0.0.1:{free_port()}"
    assert isinstance(failure(other, registration(spanning, home=nobody)), Unreachable)
    watch.role, watch.rank, watch.home = pb.WATCH_ROLE_RANK, 1, nobody
    assert isinstance(failure(other, watch), Unreachable)
    spanning.read()


def test_a_copy_of_an_old_registration_that_a_relay_sends_late_is_refused(spanning: Spanning) -> None:
    spanning.home.settled()
    late = registration(spanning, home=spanning.home.address)
    spanning.client.close()
    with Client(spanning.home.address) as client:
        spanning.session = client.open_engine(spanning.spec)
        assert isinstance(failure(spanning.other.address, late), PeerRestarted)
        control = BlockingControl(spanning.other.address)
        answer = control.register_cache(registration(spanning, home=spanning.home.address), 10)
        assert list(answer.missing_ranks) == [0]
        control.close()
