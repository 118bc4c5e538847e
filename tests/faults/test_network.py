"""The network between source and destination is cut, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry import NixlOptions
from kvferry_server.domain.times import Times
from tests.faults.cable import Cable, missing
from tests.support.faults.fault_world import World
from tests.support.faults.playing import PATIENT, judge_read, judge_release, moving, nothing_left, refused, serve, works
from tests.support.faults.processes import SOON
from tests.support.faults.scenario import Term
from tests.support.faults.scenarios import (
    CUT_IDLE,
    CUT_TOO_LONG,
    CUT_TOO_LONG_TO_ASK,
    CUT_VERDICT,
    CUT_WITH_TCP_TIMEOUT,
    HEALED_IN_TIME,
    HEALED_WHILE_IT_WAITS,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    why = missing()
    if why:
        pytest.skip(why)
    with Cable() as made:
        yield made


@pytest.fixture(scope="module")
def apart(cable: Cable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A source and its node server on one side, the destination and its own on the other."""
    # As by default, cuts heal before the fence: an agent that is destroyed while TCP sends again may end the source.
    world = World(tmp_path_factory.mktemp("apart"), cable.sides, fence_time=NixlOptions().fence_time)
    try:
        yield world.ready()
    finally:
        world.close()


@pytest.fixture(autouse=True)
def healed(cable: Cable) -> Iterator[None]:
    """The cable is whole after every test."""
    yield
    cable.heal()


def over(world: World) -> None:
    """The end of every scenario."""
    works(world)
    nothing_left(world)


def test_a_cut_before_the_read_that_heals_while_it_waits(cable: Cable, apart: World) -> None:
    row = HEALED_WHILE_IT_WAITS.expected
    request = apart.source.publish()
    cable.cut()
    reading = apart.reader.read(request, timeout=PATIENT)
    cable.heal()
    judge_read(reading, row)
    assert reading.wait_quiet(SOON)
    judge_release(apart, request, row)
    over(apart)


def test_a_cut_before_the_read_that_heals_after_its_end(cable: Cable, apart: World) -> None:
    row = CUT_TOO_LONG_TO_ASK.expected
    request = apart.source.publish()
    cable.cut()
    reading = apart.reader.read(request, timeout=Term.TIMEOUT.here)
    judge_read(reading, row)
    assert reading.wait_quiet(SOON)
    cable.heal()
    serve(apart, request)
    judge_release(apart, request, row)
    over(apart)


def test_a_cut_halfway_that_heals_within_the_lease(cable: Cable, apart: World) -> None:
    row = HEALED_IN_TIME.expected
    request, reading = moving(apart, [apart.source.second], PATIENT)
    cable.cut()
    apart.source.second.resume()
    cable.wait_lost()
    cable.heal()
    judge_read(reading, row)
    assert reading.wait_quiet(SOON)
    judge_release(apart, request, row)
    over(apart)


def test_a_cut_halfway_until_the_source_has_overwritten_the_blocks(cable: Cable, apart: World) -> None:
    row = CUT_TOO_LONG.expected
    request, reading = moving(apart, [apart.source.second], PATIENT)
    cable.cut()
    apart.source.second.resume()
    judge_read(reading, row)
    judge_release(apart, request, row)
    cable.heal()
    assert reading.wait_quiet(PATIENT)
    refused(apart, request)
    over(apart)


def test_a_cut_between_the_bytes_and_the_verdict(cable: Cable, apart: World) -> None:
    row = CUT_VERDICT.expected
    request, reading = moving(apart, [apart.source.second], PATIENT)
    apart.home.stop()
    apart.source.second.resume()
    reading.wait_moved()
    cable.cut()
    apart.home.resume()
    judge_read(reading, row)
    assert apart.reader.right()
    assert reading.wait_quiet(SOON)
    cable.heal()
    judge_release(apart, request, row)
    over(apart)


def test_a_cut_while_nothing_moves(cable: Cable, apart: World) -> None:
    request = apart.source.publish()
    serve(apart, request)
    cable.cut()
    judge_release(apart, request, CUT_IDLE.expected)
    cable.heal()
    over(apart)


def test_a_cut_that_tcp_reports(cable: Cable, tmp_path: Path) -> None:
    row = CUT_WITH_TCP_TIMEOUT.expected
    times = Times(ttl=6.0, max_ttl=6.0, engine_ttl=3.0, hold=2.0)
    world = World(tmp_path, cable.sides, times, tcp_user_timeout=Term.TCP.here).ready()
    try:
        request, reading = moving(world, [world.source.second], PATIENT)
        cable.cut()
        world.source.second.resume()
        judge_read(reading, row)
        judge_release(world, request, row)
        assert reading.wait_quiet(PATIENT)
        # The source rank may have died by now, or die when it is reached again: nothing is said of it.
        cable.heal()
        world.restart_source()
        refused(world, request)
        over(world)
    finally:
        world.close()
