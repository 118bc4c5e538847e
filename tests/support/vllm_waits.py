"""How vLLM's workers wait on machines of few cores.

For a second after each step a worker calls ``sched_yield`` until the next one. Four of them leave so little of two
cores to others that peers did not answer for seconds, and a lease ended.
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
