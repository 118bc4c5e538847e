"""Hooks before and after SGLang's methods: decode holds the pages of failed requests until they are quiet (R4), and
senders and receivers receive the prompts of their requests, for which SGLang passes only pages."""

from __future__ import annotations

import hashlib
import math
import pkgutil
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import Prompt, PromptInput

BACKEND = "kvferry"
"""The backend's name for ``--disaggregation-transfer-backend``."""

MAKES_SENDERS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
MAKES_RECEIVERS = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
"""SGLang's methods that make the sender and the receiver of a request."""

_WORD = 2**32

_queues_that_hold: list[str] = []
"""Names of the classes of decode's queues in this process that hold pages until they are quiet."""


def hold_until_quiet(_: None, queue: Any, *__: Any, **___: Any) -> None:
    """Make SGLang hold the pages of failed requests until the backend frees them, instead of for a fixed time."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend == BACKEND:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = math.inf
        if hasattr(queue, "resolve_deferred_releases"):
            _queues_that_hold.append(type(queue).__name__)


def holds_until_quiet() -> bool:
    """Return whether decode in this process holds the pages of failed requests. If a hook fails, e.g. in a version
    without the queue, SGLang only writes a log line."""
    return bool(_queues_that_hold)


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


def tells_prompts(makes: str) -> bool:
    """Return whether a hook gives prompts to the senders or receivers that a method above makes. If a hook cannot be
    installed, e.g. in a version without the method, SGLang only writes a log line."""
    queue, _, name = makes.rpartition(".")
    method = getattr(pkgutil.resolve_name(queue), name, None)
    # SGLang installs all hooks of a method at once, as one chain of wrappers, or none.
    return hasattr(method, "__wrapped__")


def prompt_of(request: Any, scheduler: Any) -> Prompt:
    """Return the prompt of SGLang's request; unknown for embeddings, whose token ids are placeholders.

    SGLang identifies a LoRA adapter by an id that each instance may choose; the scheduler has a table of names for KV
    events.
    """
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
