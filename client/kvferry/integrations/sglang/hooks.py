"""Hooks before and after SGLang's methods.

- Decode holds the pages of failed requests until they are quiet (R4).
- Senders and receivers receive the prompts of their requests, for which SGLang passes only pages.
- Prefill gives and takes prefixes: what rank 0 decides goes to all ranks with requests, and pages that are held keep
  SGLang from emptying its cache.
"""

from __future__ import annotations

import hashlib
import math
import os
import pkgutil
import select
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import Prompt, PromptInput

BACKEND = "kvferry"
"""The backend's name for ``--disaggregation-transfer-backend``."""

MAKES_SENDERS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
MAKES_RECEIVERS = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
MAKES_HANDLERS = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
SENDS_TO_RANKS = (
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)
IS_IDLE = "sglang.srt.managers.scheduler.Scheduler.is_fully_idle"
UNLOADS = "sglang.srt.managers.scheduler.Scheduler.unload_lora_adapter"
"""SGLang's methods that are hooked."""

_WORD = 2**32

queues_that_hold: list[str] = []
"""Names of the classes of decode's queues in this process that hold the pages of failed requests until they are quiet.
If a hook fails, e.g. in a version without the queue, SGLang only writes a log line."""
parts: list[Any] = []
"""The `RadixAnswers` and `RadixLoads` of this process, once its scheduler is made; none but in prefill."""
wakers: list[Waker] = []
"""On rank 0, if its scheduler sleeps."""


def hold_until_quiet(_: None, queue: Any, *__: Any, **___: Any) -> None:
    """Make SGLang hold the pages of failed requests until the backend frees them, instead of for a fixed time."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend == BACKEND:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = math.inf
        if hasattr(queue, "resolve_deferred_releases"):
            queues_that_hold.append(type(queue).__name__)


def tell_sender(made: bool, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Give a new sender the id and the prompt of its request, and the manager the request."""
    expect = getattr(request.disagg_kv_sender, "expect_prompt", None) if made else None
    if expect is not None:
        prompt = prompt_of(request, queue.scheduler)
        manager = request.disagg_kv_sender.kv_mgr
        manager.see(request, prompt.adapter)
        expect(request.rid, prompt, 0 if manager.loads is None else manager.loads.want(request, prompt))


def tell_receiver(decode_request: Any, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Give a new receiver the id, the number of tokens and the prompt of its request."""
    expect = getattr(decode_request.kv_receiver, "expect_prompt", None)
    if expect is not None:
        expect(request.rid, len(request.origin_input_ids), prompt_of(request, queue.scheduler))


def is_hooked(name: str) -> bool:
    """Return whether the hooks of a method are installed. If they cannot be, e.g. in a version without the method,
    SGLang only writes a log line."""
    owner, _, method = name.rpartition(".")
    # SGLang installs all hooks of a method at once, as one chain of wrappers, or none.
    return hasattr(getattr(pkgutil.resolve_name(owner), method, None), "__wrapped__")


def prompt_of(request: Any, scheduler: Any) -> Prompt:
    """Return the prompt of SGLang's request; unknown for embeddings, whose token ids are placeholders. Each instance
    may choose its ids of LoRA adapters; the scheduler has a table of names for KV events."""
    if request.input_embeds is not None or request.positional_embed_overrides is not None:
        return Prompt.unknown
    adapter = ""
    if request.lora_id is not None:
        adapter = scheduler.kv_event_lora_names.resolve(request.lora_id) or ""
        if not adapter:
            return Prompt.unknown
    ids = np.asarray(request.origin_input_ids, np.int64)
    inputs = (ids < 0) | (ids >= _WORD)
    return Prompt(np.where(inputs, 0, ids), adapter=adapter, inputs=_inputs(ids, inputs))


def _inputs(ids: npt.NDArray[np.int64], inputs: npt.NDArray[np.bool_]) -> list[PromptInput]:
    """Return the images and other inputs of a prompt. In place of their tokens SGLang writes hashes of the content, of
    62 bits, which are not token ids."""
    if not inputs.any():
        return []
    from sglang.srt.environ import envs

    # Without hashes, SGLang draws random numbers for each request.
    hashed = not envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()
    found = []
    for begin, end in np.flatnonzero(np.diff(inputs, prepend=False, append=False)).reshape(-1, 2).tolist():
        content = hashlib.sha256(ids[begin:end].astype("<i8").tobytes())
        found.append(PromptInput(begin, end - begin, content.hexdigest() if hashed else ""))
    return found


def send_along(receiver: Any, received: list[Any] | None, *more: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """Add the next steps to what rank 0 has received, before it goes to all ranks."""
    if received is not None:
        for waker in wakers:
            waker.clear()
        steps = (part.next_step() for part in parts)
        received = [*received, *(step for step in steps if step is not None)]
    return (receiver, received, *more), named


def is_idle(idle: bool, _: Any, for_health_check: bool = False, **__: Any) -> bool:
    """Return whether SGLang may empty its cache: not while pages are held. A health check asks whether it computes."""
    return idle and (for_health_check or not any(part.holding for part in parts))


def forget_adapter(_: Any, scheduler: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Do not look up prompts of a LoRA adapter that was unloaded: another one may be loaded under its name, while the
    cache still has what the first has computed."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is not None and queue.transfer_backend.value == BACKEND:
        queue.kv_manager.adapters.pop(asked.lora_name, None)


class Waker:
    """Wakes SGLang's scheduler where it sleeps until it receives something (``--sleep-on-idle``), by the sleep's poller
    (``IdleSleeper`` in sglang/srt/managers/scheduler_components/idle_sleeper.py; 0.5.23)."""

    def __init__(self, poller: Any) -> None:
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        poller.register(self._file, select.POLLIN)

    def wake(self) -> None:
        """Wake the scheduler, from any thread."""
        self._woken = True
        os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Let the scheduler sleep again. What it was woken for is done next."""
        if self._woken:
            self._woken = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._file)
