"""Load of every kind: requests that are read, cancelled, declined and taken back."""

from __future__ import annotations

from kvferry.errors import PromptMismatch, TransferCancelled
from tests.support.faults.fault_engines import Reading
from tests.support.faults.fault_world import World
from tests.support.faults.playing import PATIENT
from tests.support.faults.processes import SOON

AT_ONCE = 10
CONFUSED = 10
"""In one of so many tens of requests, the router is: each costs a line in the log."""
BLOCKS = 4


def serve_mixed(world: World, count: int) -> None:
    """Requests, ten at once: seven are read, one is cancelled, one declined, one taken back. Who cancelled declines, or
    another reader would be waited for. Now and then a router confuses two requests, and gives one to the other's reader
    first."""
    for batch in range(count // AT_ONCE):
        requests = [world.source.publish(BLOCKS) for _ in range(AT_ONCE)]
        declined, taken_back, *read = requests
        world.reader.process.call("decline", declined.publication.reference)
        world.source.scheduler.call("abort", taken_back.publication.number)
        if batch % CONFUSED == 0:
            _refused(world.reader.read(read[1], tokens=read[2].tokens, timeout=PATIENT))
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


def _refused(reading: Reading) -> None:
    seen = reading.outcome(PATIENT)
    assert isinstance(seen.error, PromptMismatch), seen.error
    assert reading.wait_quiet(SOON)


def _end(reading: Reading, *, may_fail: bool) -> None:
    seen = reading.outcome(PATIENT)
    assert seen.error is None or (may_fail and isinstance(seen.error, TransferCancelled)), seen.error
    assert reading.wait_quiet(SOON)
