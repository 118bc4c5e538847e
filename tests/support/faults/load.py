"""Load of every kind: requests that are read, cancelled, declined and taken back."""

from __future__ import annotations

from kvferry.errors import TransferCancelled
from tests.support.faults.fault_world import Reading, World
from tests.support.faults.playing import PATIENT
from tests.support.faults.processes import SOON

AT_ONCE = 10
BLOCKS = 4


def serve_mixed(world: World, count: int) -> None:
    """Requests, ten at once: seven are read, one is cancelled, one declined, one taken back. Who cancelled declines, or
    another reader would be waited for."""
    for _ in range(count // AT_ONCE):
        requests = [world.source.publish(BLOCKS) for _ in range(AT_ONCE)]
        declined, taken_back, *read = requests
        world.reader.process.call("decline", declined.publication.reference)
        world.source.scheduler.call("abort", taken_back.publication.number)
        readings = [world.reader.read(request, timeout=PATIENT) for request in read]
        world.reader.process.call("cancel", readings[0].number)
        for reading in readings:
            _end(reading, may_fail=reading is readings[0])
        world.reader.process.call("decline", read[0].publication.reference)
        for request in requests:
            world.source.released(request, SOON)
            assert len(request.releases) == 1
            del world.source.requests[request.publication.number]
        assert world.reader.right()


def _end(reading: Reading, *, may_fail: bool) -> None:
    seen = reading.outcome(PATIENT)
    assert seen.error is None or (may_fail and isinstance(seen.error, TransferCancelled)), seen.error
    assert reading.wait_quiet(SOON)
