"""What runs before or after methods of SGLang's: decode holds the pages of failed requests until nothing can write to
them (R4), and senders and receivers learn the prompts of their requests, of which SGLang tells them the pages."""

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


def tell_sender(made: bool, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Tell a sender that was made the id and the prompt of its request."""
    expect = getattr(request.disagg_kv_sender, "expect_prompt", None) if made else None
    if expect is not None:
        expect(request.rid, prompt_of(request, queue.scheduler))


def tell_receiver(decode_request: Any, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Tell a receiver that was made the id and the prompt of its request, and how many tokens it has."""
    expect = getattr(decode_request.kv_receiver, "expect_prompt", None)
    if expect is not None:
        expect(request.rid, len(request.origin_input_ids), prompt_of(request, queue.scheduler))


def tells_prompts(makes: str) -> bool:
    """Return whether this process tells prompts to what one of the methods above makes. SGLang only logs it if a hook
    could not be installed, e.g. in a version without the method."""
    queue, _, name = makes.rpartition(".")
    method = getattr(pkgutil.resolve_name(queue), name, None)
    # All hooks of a method are installed at once, as one chain of wrappers, or none is.
    return hasattr(method, "__wrapped__")


def prompt_of(request: Any, scheduler: Any) -> Prompt:
    """Return the prompt of SGLang's request; unknown if it is one of embeddings, whose ids are made up.

    SGLang names a LoRA adapter by an id that each instance may choose; the scheduler has a table of the names, which KV
    events need.
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
    """Return the images and other inputs of a prompt. In the place of their tokens SGLang writes hashes of their
    content, of 62 bits, which are no token ids."""
    if not inputs.any():
        return []
    from sglang.srt.environ import envs

    # Without hashes, SGLang draws numbers for each request.
    hashed = not envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()
    found = []
    for begin, end in np.flatnonzero(np.diff(inputs, prepend=False, append=False)).reshape(-1, 2).tolist():
        content = hashlib.sha256(ids[begin:end].astype("<i8").tobytes())
        found.append(PromptInput(begin, end - begin, content.hexdigest() if hashed else ""))
    return found
