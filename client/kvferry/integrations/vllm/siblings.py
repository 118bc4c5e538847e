"""The samples of one prompt in prefill (n > 1): vLLM runs each as a request of its own; they share a publication."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvferry import Publication

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's request_id of a sample: its index and its parent's request_id (vllm/v1/engine/parallel_sampling.py,
`ParentRequest.get_child_info`; 0.32.0)."""


class _Known(NamedTuple):
    contents: tuple[object, ...]
    published: Publication


class Siblings:
    """The publications of samples that are not released yet.

    Of all samples, vLLM returns the ``kv_transfer_params`` of the one that ends last, and of no other. A publication of
    each would leave all but one without a reader, and so pinned for the whole hold.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._parents: dict[int, str] = {}
        """The parent of each publication that was added, by its number."""

    def add(self, request: Any, tokens: int, published: Publication) -> None:
        """Remember the publication of the first `tokens` tokens of a request, if it is a sample."""
        parent = _CHILD.fullmatch(request.request_id)
        if parent is not None and (contents := _contents(request, tokens)) is not None:
            self._known[parent[1]] = _Known(contents, published)
            self._parents[published.number] = parent[1]

    def find(self, request: Any, tokens: int) -> Publication | None:
        """Return the publication of a sibling with the same tokens; None: there is none."""
        parent = _CHILD.fullmatch(request.request_id)
        known = None if parent is None else self._known.get(parent[1])
        if known is None or known.published.request_id == request.request_id:
            return None
        # Also compared, because clients can choose request_ids of that form.
        return known.published if known.contents == _contents(request, tokens) else None

    def released(self, number: int) -> None:
        """Forget a publication."""
        parent = self._parents.pop(number, "")
        known = self._known.get(parent)
        # A request_id may be used again while the publication of the first one is held.
        if known is not None and known.published.number == number:
            del self._known[parent]


def _contents(request: Any, tokens: int) -> tuple[object, ...] | None:
    """Return what the cache of the first `tokens` tokens depends on; None: it cannot be told from the request."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    return (
        tuple(request.all_token_ids[:tokens]),
        request.cache_salt,
        None if adapter is None else (adapter.lora_int_id, adapter.lora_name),
    )
