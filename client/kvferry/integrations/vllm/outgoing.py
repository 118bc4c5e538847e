"""The requests that prefill will publish, their blocks that are held, and the samples that share a publication."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry import Prompt, Publication
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.groups import BlockTable

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's request_id of a sample: index and request_id of the parent (vllm/v1/engine/parallel_sampling.py,
`ParentRequest.get_child_info`; 0.32.0)."""


class BlockHold:
    """The connector's own references to blocks of vLLM's pool, beside those of vLLM's requests.

    vLLM frees the blocks of a request that it preempts or aborts, and evicts blocks from its prefix cache. A block
    becomes free only with its last reference, and stays in the prefix cache until then. So a preempted request usually
    finds its own blocks there again.

    Args:
        pool: vLLM's ``BlockPool`` (``vllm/v1/core/block_pool.py``; 0.32.0); None: unknown, so nothing is held.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ids: list[int] = []

    @property
    def can_hold(self) -> bool:
        """Whether vLLM's pool was known when this hold began."""
        return self._pool is not None

    def any_of(self, ids: Set[int]) -> bool:
        return not ids.isdisjoint(self._ids)

    def add(self, blocks: Mapping[str, Blocks]) -> None:
        """Hold blocks, by group, that belong to a request now."""
        if self.can_hold:
            given = ids_of(blocks)
            self._pool.touch([self._pool.blocks[block] for block in given])
            self._ids += given

    def drop(self, blocks: Mapping[str, Blocks]) -> None:
        given = set(ids_of(blocks))
        self._free([block for block in self._ids if block in given])
        self._ids = [block for block in self._ids if block not in given]

    def free(self) -> None:
        """Free all blocks. Idempotent."""
        ids, self._ids = self._ids, []
        self._free(ids)

    def _free(self, ids: list[int]) -> None:
        if ids:
            # In reverse, as vLLM frees a request: the prefix cache keeps the beginning of a prompt the longest.
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])


def ids_of(blocks: Mapping[str, Blocks]) -> list[int]:
    """Return the ids of blocks of all groups."""
    return [block for listed in blocks.values() for block in listed.ids.tolist()]


class ComputedPart(NamedTuple):
    """Blocks that are published when every rank has computed `step`."""

    step: int
    blocks: Mapping[str, Blocks]


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request that will be published.

    Attributes:
        request: vLLM's request.
        reference: the router's reference; empty: none, and the request is published when it has finished.
        prompt: the prompt at the request's arrival; of a finished request, with the published tokens of the answer.
        held: the blocks that are published or will be soon.
        step: the last step in which the request was scheduled.
        follows: the request is another sample of the same prompt (n > 1) as a request with the same reference, and only
            that request is published.
        publication: None: nothing is published yet.
        parts: blocks that are not published yet, because some rank has not computed their step.
        planned: end of the tokens that are published or in `parts`, by group.
        closed: no more parts of the prompt are planned.
        withdrawn: the publication has failed, was released early, or was withdrawn.
        finished: vLLM has finished the request, so the blocks that were published, or will be, last are the last ones.
        payload: of the publication; comes with its last blocks.
    """

    request: Any
    reference: str = field(repr=False)
    prompt: Prompt
    held: BlockHold
    step: int = 0
    follows: bool = False
    publication: Publication | None = None
    parts: deque[ComputedPart] = field(default_factory=deque)
    planned: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    withdrawn: bool = False
    finished: bool = False
    payload: bytes = b""

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    def fills_a_block(self, tables: Sequence[BlockTable], tokens: int) -> bool:
        """Whether the first `tokens` tokens fill a block, of some group, that is not planned yet."""
        return any(
            tokens // table.entry_tokens * table.entry_tokens > self.planned.get(table.group.name, 0)
            for table in tables
            if not table.forgets
        )

    def plan(self, tables: Sequence[BlockTable], ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Add the full blocks that have the first `tokens` tokens to `parts`; `ids` are vLLM's block ids, by group."""
        blocks = {}
        for table in tables:
            name = table.group.name
            found = table.early(ids[table.index], self.planned.get(name, 0), tokens)
            if len(found.ids):
                blocks[name] = found
                self.planned[name] = found.end_token or 0
        if blocks:
            # Held from now on, because vLLM may free the blocks before the step has ended.
            self.held.add(blocks)
            self.parts.append(ComputedPart(self.step, blocks))

    def forget_parts(self) -> None:
        """Free the blocks of unpublished parts."""
        for part in reversed(self.parts):
            self.held.drop(part.blocks)
            self.planned |= {name: listed.first_token for name, listed in part.blocks.items()}
        self.parts.clear()

    def rest(self, tables: Sequence[BlockTable], blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Return those of a finished request's blocks that are not planned yet, and hold them."""
        found = {
            table.group.name: table.rest(blocks[table.group.name], self.planned.get(table.group.name, 0))
            for table in tables
        }
        self.held.add(found)
        return found


class _Known(NamedTuple):
    contents: tuple[object, ...]
    published: Publication


class Siblings:
    """The unreleased publications of the samples of one prompt (n > 1), which vLLM runs each as its own request.

    The samples share a publication: vLLM returns the ``kv_transfer_params`` of only the sample that ends last, so
    publications of the other samples would have no reader, and stay pinned for the whole hold.
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
