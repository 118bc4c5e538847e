"""Tells receivers the lengths of their requests' prompts, of which SGLang tells them the pages."""

from __future__ import annotations

import pkgutil
from typing import Any

MAKES_RECEIVERS = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
"""SGLang's method that makes the receiver of a request."""


def tell_prompt(decode_request: Any, _: Any, request: Any, *__: Any, **___: Any) -> None:
    """Tell a receiver that was made how many tokens its request has."""
    expect = getattr(decode_request.kv_receiver, "expect_prompt", None)
    if expect is not None:
        expect(len(request.origin_input_ids))


def tells_prompts() -> bool:
    """Return whether decode in this process tells receivers their prompts. SGLang only logs it if a hook could not be
    installed, e.g. in a version without the method."""
    queue, _, name = MAKES_RECEIVERS.rpartition(".")
    method = getattr(pkgutil.resolve_name(queue), name, None)
    # All hooks of a method are installed at once, as one chain of wrappers, or none is.
    return hasattr(method, "__wrapped__")
