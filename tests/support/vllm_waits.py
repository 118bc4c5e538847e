"""How vLLM's workers wait on machines of few cores.

For a second after each step a worker calls ``sched_yield`` until the next one. On Linux 6.18, several processes that do
so may keep all others from running for half a minute: leases end, and peers do not answer.
"""

from __future__ import annotations

import time

PAUSE = 0.0001


def register() -> None:
    """Let workers sleep between looks. Idempotent."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _sleep


def _sleep() -> None:
    time.sleep(PAUSE)
