"""Decoding and planning for a hostile source, or a hostile caller of PlanRead: a typed error or a plan, in bounded time
and memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry._control.granted_steps import GrantedSteps
from kvferry._wire.geometry_codec import engine_from_proto, engine_to_proto, runs_to_proto
from kvferry._wire.reference import PREFIX, format_reference, parse_reference
from kvferry.errors import BadGeometry, KvferryError
from kvferry.geometry import Blocks, EngineGeometry
from kvferry.geometry.blocks import BlockRuns
from kvferry.planner import Path as BytesPath
from kvferry.planner import PathRule, diff, plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.servicers import encode, introspection
from tests.fuzz.bounded import bounded
from tests.fuzz.conftest import FUZZ
from tests.fuzz.hostile_geometries import CASES, MAX_RANKS
from tests.fuzz.messages import edit
from tests.fuzz.methods import METHODS
from tests.fuzz.target import CPU_PER_LARGE_MESSAGE, Target, encoded
from tests.support.drawn_worlds import World, worlds
from tests.support.node_in_process import TIMEOUT, raised, running

TOKENS = 1000
every_case = pytest.mark.parametrize("case", CASES)
PLAN_READ = next(method for method in METHODS if method.path.endswith("/PlanRead"))


def read(source: EngineGeometry, destination: EngineGeometry, rule: PathRule | None = None) -> None:
    """Use a source's geometry as a reader does, up to the descriptors of a request of 1,000 tokens."""
    for rank in destination.ranks[:2]:
        # As the source's home does in the rank's handshake.
        diff(source, replace(destination, ranks=(rank,)))
        plan = plan_read(source, destination, rank.rank, rule=rule)
        plan.expand(request(source), request(destination), (0, TOKENS))


def request(engine: EngineGeometry) -> dict[str, Blocks]:
    found = {}
    for group in engine.groups:
        count = -(-TOKENS // group.block_tokens) if group.block_tokens else 1
        found[group.name] = Blocks(range(1, count + 1))
    return found


@pytest.mark.slow
@every_case
def test_a_hostile_source_costs_its_reader_little(case: str) -> None:
    with suppress(BadGeometry):
        source, destination = map(engine_from_proto, CASES[case]())
        for path in (None, *BytesPath):
            with bounded(), suppress(KvferryError):
                read(source, destination, PathRule(path))


def question(case: str) -> ipb.PlanReadRequest:
    source, destination = CASES[case]()
    return ipb.PlanReadRequest(source_geometry=source, destination_geometry=destination)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({*CASES} - {"many readers"}))
def test_a_plan_of_hostile_engines_costs_the_server_little(target: Target, case: str) -> None:
    with target.unharmed():
        target.send(PLAN_READ, encoded(question(case)), cpu=CPU_PER_LARGE_MESSAGE)


async def test_a_plan_that_takes_long_is_answered_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introspection, "PLAN_SECONDS", 0)
    async with running(tmp_path) as node:
        answer = await node.introspection.PlanRead(question("many readers"), timeout=TIMEOUT)
        assert answer.left_ranks
        planned = [plan.rank for plan in answer.ranks]
        assert [*planned, *answer.left_ranks] == list(range(MAX_RANKS))


async def test_plan_without_a_waiting_caller_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan would take minutes."""
    monkeypatch.setattr(introspection, "PLAN_SECONDS", 3600)
    async with running(tmp_path) as node:
        await raised(node.introspection.PlanRead(question("many readers"), timeout=0.5))
        planned = await node.introspection.PlanRead(question("addresses at the limit"), timeout=TIMEOUT)
        assert len(planned.ranks) == 1


@FUZZ
@given(world=worlds(), data=st.data())
def test_source_with_strange_fields_ends_in_a_typed_error(world: World, data: st.DataObject) -> None:
    source = engine_to_proto(world.source.geometry())
    edit(source, data.draw, most=4)
    destination = world.destination.geometry()
    with bounded(), suppress(KvferryError):
        decoded = engine_from_proto(geometry_pb2.EngineGeometry.FromString(encoded(source)))
        for rank in world.readers:
            plan = plan_read(decoded, destination, rank, striping=world.striping)
            encode.plan(plan)
            plan.expand(world.source_blocks, world.destination_blocks, world.tokens)


@FUZZ
@given(world=worlds(), data=st.data())
def test_blocks_with_strange_fields_end_in_a_typed_error(world: World, data: st.DataObject) -> None:
    """Steps from a hostile home, expanded by the plan of honest engines."""
    plan = plan_read(world.source.geometry(), world.destination.geometry(), world.readers[0])
    tokens = {group.name: group.block_tokens for group in world.source.groups}
    runs = [BlockRuns.of_blocks(name, blocks, tokens[name]) for name, blocks in world.source_blocks.items()]
    step = pb.Blocks(groups=map(runs_to_proto, runs))
    edit(step, data.draw, most=3)
    later = pb.Blocks(step=data.draw(st.sampled_from([0, 1, 2**32 - 1])), groups=[*step.groups][:1])
    steps = GrantedSteps()
    with bounded(), suppress(KvferryError):
        steps.add([step, later] if data.draw(st.booleans()) else [step])
        plan.expand(steps.take().blocks, world.destination_blocks, world.tokens)


def test_runs_of_many_groups_stay_short() -> None:
    """Each run has a few bytes and would expand to 64 MiB of block ids."""
    groups = [pb.GroupBlocks(group=f"{n}", run_starts=[0], run_counts=[1 << 24], end_token=1 << 24) for n in range(100)]
    steps = GrantedSteps()
    steps.add([pb.Blocks(groups=groups)])
    with bounded(), pytest.raises(KvferryError):
        steps.take()


@FUZZ
@given(data=st.data())
def test_references_of_any_text_end_in_a_typed_error(data: st.DataObject) -> None:
    message = pb.Reference(
        home="h:1", engine_id="e", incarnation=b"i" * 16, publication=1, request_id="r", key=b"k" * 16
    )
    edit(message, data.draw)
    text = format_reference(message)
    at = data.draw(st.integers(0, len(text)))
    strange = data.draw(st.sampled_from(["", "=", "\0", "\ud800", "é", "A" * 5000, PREFIX]) | st.text(max_size=4))
    for reference in (text, text[:at] + strange + text[at + 1 :], strange + text, PREFIX + strange):
        with bounded(), suppress(KvferryError):
            parse_reference(reference)
