"""The samples of one prompt in prefill (n > 1): vLLM runs each as its own request, and they share a publication."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvferry import Publication

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's request_id of a sample: index and request_id of the parent (vllm/v1/engine/parallel_sampling.py,
`ParentRequest.get_child_info`; 0.32.0)."""


class _Known(NamedTuple):
    contents: tuple[object, ...]
    published: Publication


class Siblings:
    """The unreleased publications of samples.

    vLLM returns the ``kv_transfer_params`` of only the sample that ends last. Publications of the other samples would
    have no reader, and stay pinned for the whole hold.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._parents: dict[int, str] = {}
        """The parent of each publication that was added, by its number."""

    def add(self, request: Any, tokens: int, published: Publication) -> None:
        """Remember the publication of the first `tokens` tokens of a request, if the request is a sample."""
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
        # Clients can choose request_ids of this form, so the contents are compared, too.
        return known.published if known.contents == _contents(request, tokens) else None

    def released(self, number: int) -> None:
        parent = self._parents.pop(number, "")
        known = self._known.get(parent)
        # A request_id may be used again while the publication of the first request is held.
        if known is not None and known.published.number == number:
            del self._known[parent]


def _contents(request: Any, tokens: int) -> tuple[object, ...] | None:
    """Return everything that the cache of the first `tokens` tokens depends on; None: the request does not show it."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    return (
        tuple(request.all_token_ids[:tokens]),
        request.cache_salt,
        None if adapter is None else (adapter.lora_int_id, adapter.lora_name),
    )
