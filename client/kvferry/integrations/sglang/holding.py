"""Lets SGLang's decode hold the pages of failed requests until nothing can write to them (R4)."""

from __future__ import annotations

import math
from typing import Any

BACKEND = "kvferry"
"""The backend's name for ``--disaggregation-transfer-backend``."""

_queues_that_hold: list[str] = []
"""Names of the classes of decode's queues in this process that hold pages until they are quiet."""


def hold_until_quiet(_: None, queue: Any, *__: Any, **___: Any) -> None:
    """Let SGLang hold the pages of failed requests for as long as the backend says, instead of some time."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend == BACKEND:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = math.inf
        if hasattr(queue, "resolve_deferred_releases"):
            _queues_that_hold.append(type(queue).__name__)


def holds_until_quiet() -> bool:
    """Return whether decode in this process holds the pages of failed requests. SGLang only logs it if a plug-in's hook
    has failed, e.g. in a version without the queue."""
    return bool(_queues_that_hold)
