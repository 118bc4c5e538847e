"""Faults over verbs, where a post really returns before its bytes arrive and no thread of the source takes part.

The slow tests run by hand: ``make test-rdma PYTEST_ARGS="tests/rdma/verbs/test_faults_over_verbs.py -m slow"``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.errors import KvferryError
from kvferry_server.domain.times import Times
from tests.support.faults.fault_engines import Source
from tests.support.faults.fault_world import World
from tests.support.faults.playing import PATIENT, judge_read, judge_release, moving, nothing_left, play, works
from tests.support.faults.processes import SOON
from tests.support.faults.scenario import Scenario
from tests.support.faults.verbs_scenarios import (
    ALWAYS_PLAYED,
    CANCELLED,
    DEVICE_DELETED,
    SOURCE_LOST,
    UNMAPPED,
    VERBS_PROCESSES,
)

VERBS = "rc_verbs,ud_verbs"
READING: dict[str, Any] = {
    "ucx_tls": "",
    # Many chunks under way at once. The fence is longer than anything here waits: nothing may become quiet by it.
    "chunk_bytes": 4 << 10,
    "bytes_in_flight": 128 << 10,
    "fence_time": 10 * SOON,
    "warm_up_timeout": SOON,
}
TIMES = Times(ttl=12.0, max_ttl=12.0, engine_ttl=4.0, hold=13.0, final=60.0, max_wait=60.0)
"""Longer than over TCP: a machine that is emulated reads slowly. As with the defaults, a renewal comes after a lost
engine counts as dead and before the end of its leases, so readers are notified."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Source]]:
    """The world of all tests here, and one more source at its home. They start together, which takes a minute."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as starting:
        # In the environment, which comes before the options: a list of transports cannot be an option.
        patch.setenv("UCX_TLS", VERBS)
        folder = tmp_path_factory.mktemp("world")
        world = World(folder, times=TIMES, one_sided=True, **READING)
        other = Source(world.home, folder, ucx_tls="")
        try:
            ready = starting.submit(other.ready)
            works(world.ready())
            ready.result()
            yield world, other
        finally:
            other.close()
            world.close()


@pytest.fixture
def world(everybody: tuple[World, Source]) -> World:
    """A world that works."""
    if not everybody[0].sound:
        pytest.skip("the test before left its world broken")
    return everybody[0]


def _scenarios() -> list[object]:
    return [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=() if scenario in ALWAYS_PLAYED else pytest.mark.slow,
        )
        for scenario in VERBS_PROCESSES
    ]


@pytest.mark.parametrize("scenario", _scenarios())
def test_a_process_fault_over_verbs_has_its_expected_outcome(world: World, scenario: Scenario) -> None:
    play(world, scenario)


def test_a_source_that_unmaps_its_memory_is_still_read(world: World) -> None:
    world.sound = False
    request, reading = moving(world, [world.reader.process], PATIENT)
    world.source.second.call("unmap")
    world.reader.process.resume()
    judge_read(reading, UNMAPPED.expected)
    assert reading.wait_quiet(SOON)
    judge_release(world, request, UNMAPPED.expected)
    works(world)
    nothing_left(world)
    world.sound = True


def test_a_read_can_be_cancelled_between_chunks(world: World) -> None:
    world.sound = False
    request, reading = moving(world, [], PATIENT)
    world.reader.process.call("cancel", reading.number)
    judge_read(reading, CANCELLED.expected)
    assert reading.wait_quiet(SOON)
    again = world.reader.read(request, timeout=PATIENT)
    assert again.outcome(PATIENT).error is None
    assert world.reader.right()
    assert again.wait_quiet(SOON)
    judge_release(world, request, CANCELLED.expected)
    works(world)
    nothing_left(world)
    world.sound = True


def test_a_source_that_is_killed_fails_only_its_own_reads(world: World, everybody: tuple[World, Source]) -> None:
    """Its home notifies its readers, whose blocks are quiet at once; no other read is affected."""
    world.sound = False
    living, killed = world.source, everybody[1]
    closing = world.spare.ready()
    for reader, source in ((world.reader, killed), (closing, living)):
        warming = source.publish()
        warmed = reader.read(warming, timeout=PATIENT)
        assert warmed.outcome(PATIENT).error is None
        assert warmed.wait_quiet(SOON)
        assert source.released(warming, SOON).outcome.name == "READ"
    second, going_on = killed.publish(), living.publish()
    with pytest.MonkeyPatch.context() as patch:
        # The source that is read and judged.
        patch.setattr(world, "source", killed)
        request, reading = moving(world, [world.reader.process], PATIENT)
        left, under_way = closing.read_until_moving(second, [closing.process], timeout=PATIENT)
        assert under_way
        killed.second.kill()
        for reader, its in ((closing, left), (world.reader, reading)):
            reader.process.resume()
            its.number = reader.process.answer()[0]
        # A reader that closes meanwhile waits for no report.
        closing.process.call("close")
        beside = world.reader.read(going_on, timeout=PATIENT)
        assert left.wait_quiet(SOON)
        assert beside.outcome(PATIENT).error is None
        judge_read(reading, SOURCE_LOST.expected)
        assert reading.wait_quiet(SOON)
        assert beside.wait_quiet(SOON)
        assert world.reader.right()
        assert world.reader.gauges().agents_retired == 1
        judge_release(world, request, SOURCE_LOST.expected)
    again = world.reader.read(request, timeout=5.0)
    assert isinstance(again.outcome(PATIENT).error, KvferryError)
    assert again.wait_quiet(SOON)
    killed.scheduler.kill()
    assert living.released(going_on, SOON).outcome.name == "READ"
    works(world)
    nothing_left(world)
    assert closing.right()
    world.sound = True


def test_a_rank_that_may_not_lock_its_memory_raises_an_error() -> None:
    program = """if True:
        import sys
        sys.modules["torch"] = None
        from kvferry import MemoryKind, MemoryRegion
        from kvferry._transport.nixl_agent import NixlError, ServingAgent
        memory = bytearray(1 << 20)
        import ctypes
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            ServingAgent("limited", [MemoryRegion(MemoryKind.DRAM, 0, base, len(memory))])
        except NixlError as error:
            print(error.message)
    """
    limited = ["prlimit", "--memlock=8388608", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    done = subprocess.run([*limited, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in done.stdout


def test_a_device_deleted_under_a_read_has_its_expected_outcome(world: World) -> None:
    """The last test: no process that starts after it has a device."""
    world.sound = False
    request, reading = moving(world, [world.reader.process], PATIENT)
    with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as deleting:
        world.reader.process.resume()
        judge_read(reading, DEVICE_DELETED.expected)
        assert reading.wait_quiet(SOON)
        judge_release(world, request, DEVICE_DELETED.expected)
        works(world)
        for process in (*world.source.processes, world.reader.process, world.spare.process):
            process.kill()
        assert deleting.wait(SOON) == 0
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth1"], check=True)
