"""A process that exits in the middle of a read, closing nothing. Its standard input gives the sources. If it is
`forked`, it is a child of a process that had imported kvferry."""

from __future__ import annotations

import os
import pickle
import sys

import numpy as np

from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transport import Transport
from tests.transport.sources import Memory, raw, raw_part


def main(ucx_tls: str) -> None:
    # Torch is not needed, see sources.py.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    info = pickle.load(sys.stdin.buffer)
    memory = Memory(info.regions[0].length)
    pieces = np.arange(0, info.regions[0].length, 256, dtype=np.uint64)
    whole = raw(pieces + np.uint64(info.regions[0].base), pieces + np.uint64(memory.base), np.full_like(pieces, 256))
    transport = Transport(RankMemory([memory.region], keep=memory), NixlOptions(ucx_tls=ucx_tls, chunk_descriptors=1))
    transfer = transport.start([raw_part(info, [whole])], deadline=None, label="left behind")
    while transfer.chunks < 5 and not transfer.state.final:
        transfer.wait(0.001)
    print(transfer.state.value)


if __name__ == "__main__":
    if "forked" in sys.argv and (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    main(sys.argv[1])
