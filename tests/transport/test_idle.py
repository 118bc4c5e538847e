"""R12: agents that have read and served, and now do nothing, use no CPU."""

import time
from contextlib import suppress
from pathlib import Path

from kvferry._clock import now
from kvferry._transport.transport import TransferState
from tests.transport.conftest import MakeTransport
from tests.transport.sources import SOON, Memory, Source, raw_part

IDLE_SECONDS = 3.0

# This process's threads, those of UCX included.
THREADS = Path("/proc/self/task")


def threads() -> set[str]:
    return {thread.name for thread in THREADS.iterdir()}


def cpu_seconds(these: set[str]) -> float:
    """The processor time of these threads; a thread of earlier tests that has ended counts nothing."""
    found = 0
    for thread in these:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += int((THREADS / thread / "schedstat").read_text().split()[0])
    return found / 1e9


def test_idle_agents_use_no_cpu(ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport) -> None:
    others = threads()
    read = transport(ucx_tls, reading_agents=2)
    transfer = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="before")
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE
    # Processor time, over a time in which nothing happens: load from elsewhere does not count, and neither do threads
    # that earlier tests have left to gRPC.
    agents = threads() - others
    served, own = source.cpu_seconds(), cpu_seconds(agents)
    time.sleep(IDLE_SECONDS)
    own = cpu_seconds(agents) - own
    served = source.cpu_seconds() - served
    assert {"serving": served, "reading": own} == {
        "serving": min(served, IDLE_SECONDS / 100),
        "reading": min(own, IDLE_SECONDS / 100),
    }
