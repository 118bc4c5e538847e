"""What may go wrong between a source that reuses its blocks and a reader that is late, or never comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry import ReleaseOutcome
from kvferry_server.domain.times import Times
from tests.faults.doubling import DoublingNode
from tests.support import http2
from tests.support.faults.fault_engines import Reader, Source
from tests.support.faults.fault_world import TIMES, World
from tests.support.faults.playing import PATIENT, judge_read, judge_release, moving, nothing_left, refused, works
from tests.support.faults.processes import SOON
from tests.support.faults.scenario import Term
from tests.support.faults.scenarios import DUPLICATES, HOME_GONE, NOBODY_CAME, OVERWRITTEN, STOPPED_FOR_GOOD, STRANGER
from tests.support.http2 import Connection
from tests.support.node_servers import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ucx_tls", ["", "tcp"], ids=["ucx-default", "ucx-tcp"])
def test_a_reader_that_goes_on_after_its_blocks_were_overwritten_fails_as_expired(tmp_path: Path, ucx_tls: str) -> None:
    world = World(tmp_path, ucx_tls=ucx_tls).ready()
    try:
        for _ in range(2):
            request, reading = moving(world, [world.reader.process], PATIENT)
            judge_release(world, request, OVERWRITTEN.expected)
            # Released means overwritten here. Of the old bytes some have arrived; the rest of a read that goes on
            # would be of the new ones.
            world.reader.process.resume()
            judge_read(reading, OVERWRITTEN.expected)
            assert reading.wait_quiet(SOON)
            refused(world, request)
        works(world)
        nothing_left(world)
    finally:
        world.close()


def test_a_reader_that_never_comes(world: World) -> None:
    world.sound = False
    requests = [world.source.publish(16) for _ in range(4)]
    for request in requests:
        judge_release(world, request, NOBODY_CAME.expected)
    for request in requests:
        judge_read(world.reader.read(request, timeout=PATIENT), NOBODY_CAME.expected)
    works(world)
    nothing_left(world)
    world.sound = True


def test_a_source_rank_that_never_goes_on(world: World) -> None:
    world.sound = False
    request, reading = moving(world, [world.source.second], Term.TIMEOUT.here)
    judge_read(reading, STOPPED_FOR_GOOD.expected)
    judge_release(world, request, STOPPED_FOR_GOOD.expected)
    # By the end of the agent, which may abort the source: it is on its way out here, as its supervisor would have it.
    assert reading.wait_quiet(Term.FENCE.here + SOON)
    world.restart_source()
    refused(world, request)
    works(world)
    nothing_left(world)
    world.sound = True


def test_a_home_that_never_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path, times=Times(ttl=3.0, max_ttl=3.0, hold=3.5, final=6.0)).ready()
    try:
        works(world)
        request = world.source.publish()
        world.home.kill()
        reading = world.reader.read(request, timeout=Term.TIMEOUT.here)
        judge_read(reading, HOME_GONE.expected)
        assert reading.wait_quiet(SOON)
        judge_release(world, request, HOME_GONE.expected)
        assert request.releases[0].local
        # When another home takes its place after all, nothing is released again.
        world.home.start().ready()
        works(world)
        nothing_left(world)
    finally:
        world.close()


def test_a_stranger_who_would_end_the_server(world: World) -> None:
    world.sound = False
    pid = world.home.pid
    for _ in range(4):
        request, reading = moving(world, [world.source.second], PATIENT)
        for _ in range(25):
            with Connection(world.home.listen) as peer:
                headers = http2.request_headers("/", path=b"/\xff")
                peer.send(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers), *http2.data(1, http2.message(b"")))
                assert peer.ended(1)
        world.source.second.resume()
        judge_read(reading, STRANGER.expected)
        assert reading.wait_quiet(SOON)
        judge_release(world, request, STRANGER.expected)
    assert (world.home.alive, world.home.pid) == (True, pid)
    works(world)
    nothing_left(world)
    world.sound = True


def test_messages_sent_twice_have_no_further_effect(tmp_path: Path) -> None:
    settings = {"engine_ttl": TIMES.engine_ttl, "ttl": TIMES.ttl, "hold": TIMES.hold, "drain": 1.0}
    node = DoublingNode(tmp_path / "node", f"127.0.0.1:{free_port()}", **settings)
    node.start().ready()
    source, reader = Source(node, tmp_path), Reader(node, tmp_path, ucx_tls="tcp")
    try:
        source.ready()
        reader.ready()
        for index in range(10):
            request = source.publish(8)
            if index % 5 == 4:
                reader.process.call("decline", request.publication.reference)
            else:
                judge_read(reading := reader.read(request, timeout=PATIENT), DUPLICATES.expected)
                assert reader.right()
                assert reading.wait_quiet(SOON)
            outcome = source.released(request, SOON).outcome
            assert outcome in ((ReleaseOutcome.DECLINED,) if index % 5 == 4 else DUPLICATES.expected.source)
        until(node.idle)
        assert source.collect() == []
        assert all(len(request.releases) == 1 for request in source.requests.values())
        assert {method.rpartition("/")[2] for method in node.doubled} > {
            "RegisterCache",
            "Handshake",
            "ReadBlocks",
            "Notify",
            "Watch",
        }
    finally:
        source.close()
        reader.close()
        node.kill()
