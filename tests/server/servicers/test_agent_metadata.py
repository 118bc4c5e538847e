"""Which readers get the agents of an engine, which are access to its memory, and which do not (PROTOCOL, Authority)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry._clock import now
from kvferry._engine_spec import EngineSpec
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._wire.authority import KEY_BYTES
from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.reference import format_reference, parse_engine_reference
from kvferry.errors import (
    AgentsWithheld,
    BadReference,
    HomeRecovering,
    InvalidField,
    KvferryError,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    WrongKey,
)
from kvferry.planner import PathRule
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.blocking_control import BlockingControl
from tests.support.certificates import Authority, tls_flags
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    Watch,
    engine_reference,
    handshake_request,
    proto,
    publish_notification,
    raised,
    read_done,
    reference,
    register_request,
    running,
    snapshot,
)
from tests.support.node_servers import Kvferryd
from tests.support.parties import FULL, P2, SECRETS, TIMES, D, P, key, rank_geometry, start
from tests.support.stubs import KVTransferStub

METADATA = register_request().agent.metadata


async def told(node: Node, given: str) -> bool:
    """Whether a reader with this reference gets the agents; it gets the geometry in any case."""
    found = await node.handshake(reference=given)
    assert len(found.geometry.ranks) == 1
    assert found.has_agents == bool(found.agents)
    return found.has_agents and found.agents[0].metadata == METADATA


def engine_reference_with(**changes: Any) -> str:
    given = {"home": ADVERTISE, "engine_id": P.engine_id, "incarnation": P.incarnation, "key": b"g" * KEY_BYTES}
    return format_reference(pb.EngineReference(**{**given, **changes}))


async def test_stranger_gets_the_geometry_without_agents(ready: Node) -> None:
    assert not await told(ready, "")
    messages = [message async for message in ready.kv.Handshake(handshake_request(reference=""), timeout=TIMEOUT)]
    assert all(METADATA not in message.SerializeToString() for message in messages)


async def test_reader_with_a_valid_reference_gets_the_agents(ready: Node) -> None:
    assert await told(ready, engine_reference())
    # A publication that has not arrived, and has no waiting readers.
    assert await told(ready, reference(7))
    await ready.publish(1)
    assert await told(ready, reference(1))
    await ready.read(9)
    assert await told(ready, reference(9))


async def test_a_reference_is_good_until_its_publication_is_released(ready: Node) -> None:
    await ready.publish(1)
    lease_id = (await ready.read(1)).accepted.lease_id
    # Its reader may still need access to the memory.
    await ready.source(pb.Notification(abort=pb.Abort(publication=1)))
    assert await told(ready, reference(1))
    await ready.reader(read_done(lease_id, 0))
    assert isinstance(await raised(ready.handshake(reference=reference(1))), PublicationReleased)
    await ready.publish(2)
    await ready.reader(pb.Notification(decline=pb.Decline(reference=reference(2))))
    assert isinstance(await raised(ready.handshake(reference=reference(2))), PublicationReleased)
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[2])))
    assert isinstance(await raised(ready.handshake(reference=reference(2))), PublicationStale)
    assert await told(ready, engine_reference())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (engine_reference_with(), WrongKey),
        (engine_reference_with(key=key(1)), WrongKey),
        # Well-formed: the home may be left to a directory.
        (engine_reference_with(home=""), WrongKey),
        (reference(1, wrong=b"g" * KEY_BYTES), WrongKey),
        (reference(7, wrong=key(8)), WrongKey),
        (reference(7, wrong=parse_engine_reference(engine_reference()).key), WrongKey),
        (engine_reference(D), InvalidField),
        (reference(1, D), InvalidField),
        (engine_reference(P2), PeerRestarted),
        (reference(1, P2), PeerRestarted),
        (engine_reference_with(key=b"short"), BadReference),
        (engine_reference_with(incarnation=b"short"), BadReference),
        (engine_reference_with(home="h" * 5000), BadReference),
        ("kvf1e.?", BadReference),
        ("kvf2.AA", BadReference),
    ],
)
async def test_reader_with_an_invalid_reference_is_refused(
    ready: Node, given: str, expected: type[KvferryError]
) -> None:
    await ready.publish(1)
    error = await raised(ready.handshake(reference=given))
    assert isinstance(error, expected)
    assert parse_engine_reference(engine_reference()).key.hex() not in str(error.values)
    if expected is WrongKey:
        assert error.code == "PERMISSION_DENIED"


async def test_incarnation_of_the_request_must_be_that_of_the_reference(ready: Node) -> None:
    error = await raised(ready.handshake(incarnation=P2.incarnation))
    assert isinstance(error, PeerRestarted)


async def test_engine_never_gets_its_own_agents(ready: Node) -> None:
    own = pb.HandshakeRequest(engine_id=P.engine_id, reader=proto(P), reference=engine_reference())
    found = await ready.handshake(own)
    assert (len(found.geometry.ranks), found.has_agents) == (1, False)


async def test_unreadable_geometry_is_refused_with_any_reference(ready: Node) -> None:
    error = await raised(ready.handshake(identity={"model": "other"}, reference=engine_reference()))
    assert error.reason == "INCOMPATIBLE"


async def test_references_outlive_their_home(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        assert isinstance(await raised(node.handshake(reference=reference(1))), HomeRecovering)
        watch = Watch(node)
        assert await watch.kinds(2) == ["opened", "synced"]
        await node.register()
        assert await told(node, engine_reference())
        # The home may have released the publication before its restart.
        assert isinstance(await raised(node.handshake(reference=reference(4))), HomeRecovering)
        await node.source(*snapshot(publish_notification(4), high_water=5))
        assert await told(node, reference(4))
        assert await told(node, reference(6))
        assert isinstance(await raised(node.handshake(reference=reference(5))), PublicationStale)
        node.pass_by(TIMES.max_ttl)


# From outside.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kvferryd, Authority]]:
    """On mutual TLS and on a UNIX socket."""
    ours = Authority.make(tmp_path_factory.mktemp("ours"), "ours")
    path = tmp_path_factory.mktemp("mutual") / "node.sock"
    flags = ["--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--unix", str(path), *tls_flags(ours.issue("node"))]
    with Kvferryd(*flags) as running:
        yield running, ours


@pytest.fixture(scope="module")
def plain() -> Iterator[Kvferryd]:
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "") as running:
        yield running


@pytest.mark.parametrize("way", ["mtls", "unix", "tcp"])
def test_stranger_gets_no_agents_by_any_call(server: tuple[Kvferryd, Authority], plain: Kvferryd, way: str) -> None:
    mutual, ours = server
    address = {"mtls": mutual.advertise, "unix": mutual.address, "tcp": plain.address}[way]
    tls: TlsConfig | None = ours.issue("stranger") if way == "mtls" else None
    source = start(f"source-{way}", "S")
    with connect(address, ours.issue("engine") if way == "mtls" else None) as channel:
        engine: Any = KVTransferStub(channel)
        watch = engine.Watch(
            pb.WatchRequest(engine=proto(source), session_secret=SECRETS[source], role=pb.WATCH_ROLE_SCHEDULER)
        )
        next(watch)
        registration = register_request(ref=source)
        engine.RegisterCache(registration, timeout=TIMEOUT)
        with connect(address, tls) as strange:
            listed: Any = IntrospectionStub(strange)
            answers = [
                listed.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT),
                listed.GetEngine(ipb.GetEngineRequest(engine_id=source.engine_id), timeout=TIMEOUT),
            ]
            assert all(registration.agent.metadata not in answer.SerializeToString() for answer in answers)
        home = BlockingControl(address, tls)
        asked = handshake_request(engine_id=source.engine_id, incarnation=source.incarnation, reference="")
        found = home.handshake(asked, TIMEOUT)
        assert (len(found.geometry.ranks), found.agents, found.has_agents) == (1, {}, False)
        asked.reference = engine_reference_with(engine_id=source.engine_id, incarnation=source.incarnation)
        with pytest.raises(WrongKey):
            home.handshake(asked, TIMEOUT)
        # A reader that needs agents gets an error that names the missing reference.
        spec = EngineSpec("decode", (FULL,), identity={"model": "m"})

        async def unmeasured(*_: object) -> None: ...

        peers = SourceEngines(
            home.loop, spec, proto(D), rank_geometry(), home.control, PathRule(), unmeasured, lambda _: None
        )

        def get(reference: str) -> SourceEngine:
            until = now() + TIMEOUT
            key = (home.control.address, source.engine_id, source.incarnation)
            return home.loop.run(peers.get(home.control, key, reference, until))

        with pytest.raises(AgentsWithheld) as caught:
            get("")
        assert caught.value.values == {"engine_id": source.engine_id, "missing": "reference"}
        assert get(engine_reference(source)).agents
        home.close()
        watch.cancel()
