"""R12: what has read and served, and now does nothing, uses no CPU."""

import time

from kvferry._clock import now
from kvferry._transport.transport import TransferPart, TransferState
from tests.transport.conftest import MakeTransport
from tests.transport.sources import SOON, Memory, Source

IDLE_SECONDS = 3.0


def test_idle_agents_use_no_cpu(ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport) -> None:
    read = transport(ucx_tls, reading_agents=2)
    transfer = read.start([TransferPart(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="before")
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE
    # Processor time, over a time in which nothing happens: load from elsewhere does not count.
    served, own = source.cpu_seconds(), time.process_time()
    time.sleep(IDLE_SECONDS)
    own = time.process_time() - own
    served = source.cpu_seconds() - served
    assert {"serving": served, "reading": own} == {
        "serving": min(served, IDLE_SECONDS / 100),
        "reading": min(own, IDLE_SECONDS / 100),
    }
