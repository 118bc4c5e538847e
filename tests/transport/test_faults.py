"""Sources that die, stop and come back: every transfer ends, is quiet in the end, and no other peer notices."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transport import TransferState
from kvferry.errors import TransferCancelled, TransferExpired
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import POISON, SOON, Memory, Source, raw_part
from tests.transport.transfers import TCP, Clock, assert_done, assert_failed, read_all, until


@pytest.mark.parametrize("warmed", [False, True], ids=["before its first read", "between reads"])
def test_a_killed_source_fails_only_its_own_reads(
    warmed: bool, ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    victim, successor = new_source(ucx_tls, size=4 << 20), new_source(ucx_tls, size=4 << 20)
    if warmed:
        assert_done(read_all(read, victim, memory, at=8 << 20))
        assert_done(read_all(read, source, memory))
    victim.info  # noqa: B018 (it has to run before it is killed)
    victim.kill()
    failing = [read_all(read, victim, memory, at=8 << 20) for _ in range(3)]
    others = [read_all(read, source, memory) for _ in range(3)]
    for transfer in failing:
        assert_failed(transfer)
    for transfer in others:
        assert_done(transfer)
    # At once, under its new name, with the same transport.
    assert_done(read_all(read, successor, memory, at=8 << 20))
    assert memory.right()
    assert read.gauges().uncertain == 0
    assert until(lambda: read.gauges().retired_agents == 0)


def test_a_source_killed_while_it_is_read_fails_that_read_only(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    # Chunks so small that it cannot be over before the kill.
    read = transport(ucx_tls, chunk_descriptors=1, chunk_bytes=256, bytes_in_flight=4096)
    victim, successor = new_source(ucx_tls), new_source(ucx_tls, size=4 << 20)
    doomed = read_all(read, victim, memory, at=8 << 20, deadline=None)
    other = read.start(
        [raw_part(source.info, [memory.pieces(source, [(0, 0, 1 << 20)])])], deadline=None, label="other"
    )
    assert until(lambda: doomed.chunks > 3)
    victim.kill()
    assert_failed(doomed)
    assert doomed.bytes_done < victim.size
    assert_done(other)
    memory.expected[8 << 20 :] = memory.bytes[8 << 20 :]
    assert_done(read_all(read, successor, memory, at=8 << 20))
    assert memory.right()
    assert until(lambda: read.gauges().retired_agents == 0)


def test_a_source_stopped_while_it_is_read_expires_and_is_quarantined_until_it_goes_on(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    source, clock = new_source(TCP), Clock()
    read = transport(TCP, clock=clock, chunk_bytes=1 << 20, bytes_in_flight=2 << 20)
    stopped = new_source(TCP)
    assert_done(read_all(read, stopped, memory, at=8 << 20))
    memory.bytes[:] = POISON
    stopped.stop()
    late = read_all(read, stopped, memory, at=8 << 20)
    assert until(lambda: late.chunks_in_flight == 2)
    clock.later += SOON
    assert late.wait(SOON)
    assert late.state is TransferState.EXPIRED
    assert isinstance(late.error, TransferExpired)
    assert not late.quiet
    assert not late.error.quiet
    assert not late.wait_quiet(0.05)
    assert read.gauges().uncertain == 1
    # R10: all other reads go on, on the same agent.
    assert_done(read_all(read, source, memory, deadline=None))
    # A read that waits behind it for the same source expires without having been posted: quiet at once.
    behind = read_all(read, stopped, memory, at=8 << 20, deadline=clock.later + 0.1)
    assert behind.wait(SOON)
    assert behind.state is TransferState.EXPIRED
    assert behind.quiet
    stopped.resume()
    assert late.wait_quiet(SOON)
    assert late.state is TransferState.EXPIRED
    assert late.error.quiet
    assert read.gauges().uncertain == 0
    assert until(lambda: read.gauges().quiesced == 1)
    # Nothing was given up: the peer is read again as if nothing had been.
    assert read.gauges().agents == 1
    assert_done(read_all(read, stopped, memory, at=8 << 20, deadline=None))
    assert memory.right()


def test_a_stuck_read_retires_its_agent_whose_end_is_the_fence(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    source, clock = new_source(TCP), Clock()
    read = transport(TCP, clock=clock, chunk_bytes=1 << 20)
    stopped = new_source(TCP)
    assert_done(read_all(read, stopped, memory, at=8 << 20))
    memory.bytes[:] = POISON
    stopped.stop()
    late = read_all(read, stopped, memory, at=8 << 20)
    assert until(lambda: late.chunks_in_flight > 0)
    clock.later += SOON
    assert late.wait(SOON)
    assert not late.quiet
    clock.later += NixlOptions().fence_time
    assert late.wait_quiet(SOON)
    assert late.state is TransferState.EXPIRED
    assert until(lambda: read.gauges().retired_agents == 0)
    assert read.gauges().quiesced == 1
    assert_done(read_all(read, source, memory, deadline=None))
    # A fresh agent, a stopped peer: no first answer, nothing posted, so nothing is uncertain.
    again = read_all(read, stopped, memory, at=8 << 20, deadline=None)
    assert until(lambda: read.gauges().peers == 2)
    clock.later += SOON + 0.1
    assert again.wait(SOON)
    assert again.state is TransferState.FAILED
    assert again.quiet
    # Even if the source goes on now, nothing more arrives.
    stopped.resume()
    memory.expected[8 << 20 :] = POISON
    assert memory.right()
    assert source.alive()


def test_an_agent_given_up_still_finishes_what_it_reads_from_others(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20, fence_time=0.3)
    victim, slow = new_source(TCP, size=4 << 20), new_source(TCP)
    assert_done(read_all(read, victim, memory, at=8 << 20))
    assert_done(read_all(read, slow, memory))
    slow.stop()
    patient = read_all(read, slow, memory)
    assert until(lambda: patient.chunks_in_flight > 0)
    victim.kill()
    doomed = read_all(read, victim, memory, at=8 << 20)
    assert doomed.wait(SOON)
    assert doomed.state is TransferState.FAILED
    # Uncertain for as long as the other read needs the agent, whose end is the fence.
    assert until(lambda: read.gauges().retired_agents == 1)
    assert not doomed.wait_quiet(0.5)
    assert read.gauges().retired_agents == 1
    slow.resume()
    assert_done(patient)
    assert doomed.wait_quiet(SOON)
    assert memory.right()


def test_a_source_that_does_not_answer_at_first_fails_its_reads_in_bounded_time(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    clock = Clock()
    read = transport(ucx_tls, clock=clock)
    silent = new_source(ucx_tls)
    silent.info  # noqa: B018
    silent.stop()
    transfer = read_all(read, silent, memory, at=8 << 20, deadline=None)
    assert_done(read_all(read, source, memory))
    clock.later += SOON + 0.1
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.FAILED
    assert transfer.quiet
    silent.resume()
    assert_done(read_all(read, silent, memory, at=8 << 20, deadline=None))
    assert memory.right()


def test_cancel_ends_at_once_and_reports_chunks_still_under_way(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20, bytes_in_flight=2 << 20)
    slow = new_source(TCP)
    assert_done(read_all(read, slow, memory))
    memory.bytes[:] = POISON
    slow.stop()
    moving = read_all(read, slow, memory, deadline=None)
    assert until(lambda: moving.chunks_in_flight == 2)
    waiting = read_all(read, slow, memory, at=8 << 20, deadline=None)
    ended: list[str] = []
    moving.add_done_callback(lambda _: ended.append("moving done"))
    moving.add_quiet_callback(lambda _: ended.append("moving quiet"))
    waiting.add_done_callback(lambda _: ended.append("waiting done"))
    waiting.add_quiet_callback(lambda _: ended.append("waiting quiet"))
    assert waiting.cancel()
    assert not moving.cancel()
    for transfer in (moving, waiting):
        assert transfer.state is TransferState.CANCELLED
        assert isinstance(transfer.error, TransferCancelled)
    assert until(lambda: {"moving done", "waiting done", "waiting quiet"} <= set(ended))
    assert "moving quiet" not in ended
    slow.resume()
    assert moving.wait_quiet(SOON)
    assert until(lambda: "moving quiet" in ended)
    # Not a byte beyond the chunks that were posted.
    assert moving.chunks == 2
    assert (memory.bytes[2 << 20 :] == POISON).all()


def test_a_source_that_restarts_under_its_name_is_read_with_its_new_metadata(
    ucx_tls: str, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    first = new_source(ucx_tls, size=4 << 20, name=f"same-name-{ucx_tls}")
    assert_done(read_all(read, first, memory))
    first.kill()
    second = new_source(ucx_tls, size=4 << 20, name=first.name)
    assert second.info != first.info
    assert_done(read_all(read, second, memory, at=8 << 20))
    assert memory.right()


def test_retiring_too_many_agents_fails_new_reads_of_that_peer_only(
    source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport, ucx_tls: str
) -> None:
    read = transport(ucx_tls, retired_agents=0)
    victim = new_source(ucx_tls, size=4 << 20)
    assert_done(read_all(read, victim, memory, at=8 << 20))
    victim.kill()
    first = read_all(read, victim, memory, at=8 << 20)
    assert first.wait(SOON)
    assert first.state is TransferState.FAILED
    assert not first.quiet
    second = read_all(read, victim, memory, at=8 << 20)
    assert second.wait(SOON)
    assert second.state is TransferState.FAILED
    assert second.quiet
    assert_done(read_all(read, source, memory))
    assert memory.right()
    assert read.gauges().uncertain == 1
    assert read.close(SOON)
    assert first.quiet


def test_closing_cancels_and_waits_for_quiet(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls, chunk_bytes=4096, chunk_descriptors=1, bytes_in_flight=8192)
    transfers = [read_all(read, source, memory) for _ in range(4)]
    assert until(lambda: transfers[0].chunks > 0)
    assert read.close(SOON)
    assert all(transfer.quiet for transfer in transfers)
    assert {transfer.state for transfer in transfers} <= {TransferState.CANCELLED, TransferState.DONE}
    assert read.gauges().agents == 0
    assert source.alive()


def test_an_agent_that_cannot_be_made_fails_the_read(source: Source, memory: Memory, transport: MakeTransport) -> None:
    # Shared memory cannot report a peer's death, so UCX makes no endpoint of it in error mode "peer".
    read = transport("sm")
    transfer = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=None, label="sm")
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.FAILED
    assert transfer.quiet
    assert "createBackend" in str(transfer.error)
    assert until(lambda: read.gauges().agents == 0)


@pytest.mark.parametrize("how", ["", "forked"])
def test_a_process_may_exit_in_the_middle_of_a_read(ucx_tls: str, source: Source, how: str) -> None:
    command = [sys.executable, "-m", "tests.transport.leaver", ucx_tls, how]
    done = subprocess.run(command, input=pickle.dumps(source.info), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"moving\n"), done.stderr
    assert source.alive()
