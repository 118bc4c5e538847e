"""`RegisterCache` and `Handshake`: the ranks of an engine, and the answers to its readers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvferry._clock import from_duration
from kvferry._wire.geometry_codec import rank_to_proto
from kvferry.errors import (
    BadAgentMetadata,
    BadGeometry,
    CacheDiffers,
    EngineIncomplete,
    EngineUnknown,
    Incompatible,
    InvalidField,
    KvferryError,
    PeerRestarted,
    RelayLoop,
    WrongSession,
)
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    handshake_request,
    proto,
    raised,
    register_request,
    running,
)
from tests.support.parties import FULL, P2, SECRETS, TIMES, P, rank_geometry


async def test_rank_registers_and_gets_the_missing_ranks(node: Node) -> None:
    await node.open_engine()
    first = await node.register(0, 2)
    assert list(first.missing_ranks) == [1]
    assert first.advertise == ADVERTISE
    assert not (await node.register(1, 2)).missing_ranks
    assert await node.register(0, 2) == await node.register(0, 2)


async def test_registrations_need_an_open_session(node: Node) -> None:
    request = register_request()
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), EngineUnknown)
    await node.open_engine()
    request.session_secret = b"s" * 32
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), WrongSession)
    request.session_secret = SECRETS[P]
    await node.kv.RegisterCache(request, timeout=TIMEOUT)


async def test_registration_of_other_content_is_refused(ready: Node) -> None:
    error = await raised(ready.register(geometry=rank_geometry(base=1 << 20)))
    assert isinstance(error, CacheDiffers)
    assert error.values["field"] == "rank.planes[layers.0/key].base"


async def test_new_incarnation_gets_the_end_of_the_last_lease_on_the_old_one(node: Node) -> None:
    watch = await node.open_engine()
    assert from_duration((await node.register()).reuse_after) == 0
    await node.publish()
    await node.read()
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    answer = await node.register(ref=P2)
    assert from_duration(answer.reuse_after) == TIMES.ttl - TIMES.engine_ttl


async def test_a_home_that_is_new_does_not_know_older_leases(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        await node.open_engine()
        assert from_duration((await node.register()).reuse_after) == TIMES.max_ttl


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"relayed_by": "third:1", "home": "other:1"}, RelayLoop),
        ({"home": "other:1"}, InvalidField),
        ({"home": "nonsense"}, InvalidField),
        ({"session_secret": b""}, InvalidField),
        ({"num_ranks": 0}, InvalidField),
        ({"num_ranks": 1 << 31}, InvalidField),
    ],
)
async def test_registrations_that_are_invalid_are_refused(
    node: Node, changes: dict[str, Any], expected: type[KvferryError]
) -> None:
    await node.open_engine()
    assert isinstance(await raised(node.register(**changes)), expected)


async def test_damaged_agent_metadata_is_refused(node: Node) -> None:
    await node.open_engine()
    request = register_request()
    request.agent.metadata += b"!"
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), BadAgentMetadata)
    request = register_request()
    request.ClearField("rank")
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), InvalidField)


async def test_a_big_rank_registers_and_is_handshaken(node: Node) -> None:
    # Big enough to be decoded and planned on the worker thread.
    await node.open_engine()
    geometry = rank_geometry()
    request = register_request()
    del request.rank.planes[:]
    for layer in range(200):
        for plane in rank_to_proto(geometry).planes[:2]:
            plane.layer, plane.shared = f"layers.{layer}", True
            request.rank.planes.append(plane)
    await node.kv.RegisterCache(request, timeout=TIMEOUT)
    # Layers may share their memory at a source, but not at a destination.
    for index, plane in enumerate(request.rank.planes):
        plane.base += index << 27
    answer = await node.handshake(rank=request.rank)
    assert len(answer.geometry.ranks[0].planes) == 400


async def test_planes_over_the_same_bytes_are_refused_unless_both_say_that_they_share_them(node: Node) -> None:
    await node.open_engine()
    request = register_request()
    first = rank_to_proto(rank_geometry()).planes[0]
    del request.rank.planes[:]
    for layer, says in (("one", True), ("two", False)):
        first.layer, first.shared = layer, says
        request.rank.planes.append(first)
    error = await raised(node.kv.RegisterCache(request, timeout=TIMEOUT))
    assert isinstance(error, BadGeometry)
    assert error.values["where"] == f"rank 0, planes one/{first.component} and two/{first.component}"
    assert "Are both layers the same tensor?" in error.values["problem"]
    request.rank.planes[1].shared = True
    assert (await node.kv.RegisterCache(request, timeout=TIMEOUT)).num_missing == 0


async def test_an_engine_that_lacked_heads_may_register_with_another_cache(node: Node) -> None:
    """Nothing of the first registration stays: publications are checked, and bytes counted, by the second."""
    await node.open_engine()
    wrong = register_request()
    for plane in wrong.rank.planes:
        plane.unit_begin, plane.unit_end = 0, 4
    assert isinstance(await raised(node.kv.RegisterCache(wrong, timeout=TIMEOUT)), BadGeometry)
    small = dataclasses.replace(FULL, num_blocks=5)
    planes = tuple(dataclasses.replace(plane, num_blocks=5) for plane in rank_geometry().planes)
    geometry = dataclasses.replace(rank_geometry(), planes=planes)
    await node.register(geometry=geometry, groups=(small,))
    beyond = pb.GroupBlocks(group="full", end_token=16, run_starts=[5], run_counts=[1])
    assert (await node.publish(1, groups=[beyond])).error.reason == errors_pb2.BAD_BLOCK
    await node.publish(2)
    lease_id = (await node.read(2)).accepted.lease_id
    report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=2**64 - 1)
    await node.reader(pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=[report])))
    assert node.home.journal.read_bytes == 4 * sum(plane.bytes_per_block for plane in planes)


async def test_a_handshake_answers_the_whole_engine(node: Node) -> None:
    await node.open_engine()
    for rank in range(2):
        await node.register(rank, 2)
    answer = await node.handshake()
    engine = answer.geometry
    assert (engine.engine_id, engine.incarnation) == (P.engine_id, P.incarnation)
    assert [rank.rank for rank in engine.ranks] == [0, 1]
    assert {rank: agent.name for rank, agent in answer.agents.items()} == {
        rank: f"prefill/{P.incarnation.hex()}/{rank}" for rank in (0, 1)
    }
    first, *pages = [message async for message in node.kv.Handshake(handshake_request(), timeout=TIMEOUT)]
    assert (from_duration(first.times.final), first.num_ranks) == (TIMES.final, 2)
    assert {message.home_epoch for message in (first, *pages)} == {node.home.epoch}


async def test_unreadable_geometry_is_refused_before_any_metadata(ready: Node) -> None:
    request = handshake_request(identity={"model": "another"})
    request.rank.planes[0].format = "other"
    error = await raised(ready.handshake(request))
    assert isinstance(error, Incompatible)
    fields = {(mismatch.kind, mismatch.source, mismatch.destination) for mismatch in error.mismatches}
    assert ("identity", "m", "another") in fields
    assert any(kind == "format" for kind, _, _ in fields)


async def test_a_reader_that_declares_a_byte_twice_is_refused(ready: Node) -> None:
    request = handshake_request()
    request.rank.planes[1].base = request.rank.planes[0].base
    error = await raised(ready.handshake(request))
    assert isinstance(error, BadGeometry)
    assert error.values["where"] == "rank 0, planes layers.0/key and layers.0/value"


async def test_an_engine_that_handshakes_with_itself_learns_its_geometry_without_agents(node: Node) -> None:
    await node.open_engine()
    await node.register(0, 2)
    own = pb.HandshakeRequest(engine_id=P.engine_id, reader=proto(P))
    error = await raised(node.handshake(own))
    assert isinstance(error, EngineIncomplete)
    assert error.values["missing_ranks"] == "1"
    await node.register(1, 2)
    answer = await node.handshake(own)
    assert len(answer.geometry.ranks) == 2
    assert not answer.agents
    own.reader.incarnation = P2.incarnation
    assert isinstance(await raised(node.handshake(own)), PeerRestarted)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine_id": "nobody", "incarnation": b"", "reference": ""}, EngineUnknown),
        ({"engine_id": ""}, InvalidField),
        ({"incarnation": b"x"}, InvalidField),
        ({"incarnation": P2.incarnation}, PeerRestarted),
        ({"reader": None}, InvalidField),
        ({"rank": None}, InvalidField),
        ({"groups": []}, KvferryError),
        ({"identity": {str(key): "" for key in range(300)}}, InvalidField),
    ],
)
async def test_handshakes_that_are_invalid_are_refused(
    ready: Node, changes: dict[str, Any], expected: type[KvferryError]
) -> None:
    error = await raised(ready.handshake(**changes))
    assert isinstance(error, expected)
    assert error.code != "INTERNAL"
