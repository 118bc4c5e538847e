"""The requests that prefill will publish, and the connector's own references to blocks of vLLM's pool, beside those of
vLLM's requests."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry import Prompt, Publication, Question
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.setup import BlockTable


class BlockHolds:
    """Blocks that are held for publications, in vLLM's ``BlockPool`` (``vllm/v1/core/block_pool.py``; 0.32.0).

    vLLM frees the blocks of a request that it preempts, aborts or finishes, and evicts blocks from its prefix cache. A
    block becomes free only with its last reference, and stays in the prefix cache until then. So a preempted request
    usually finds its own blocks there again.

    A block is referred to once, until the last publication that has it drops it: thousands of answers may have the same
    beginning. A publication has each of its blocks once.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._holders = np.zeros(pool.num_gpu_blocks, np.int64)
        """How many publications have each block."""
        self._count = 0

    def with_more(self, ids: npt.ArrayLike) -> int:
        """Return how many blocks would be held with these."""
        return self._count + int(np.count_nonzero(self._holders[np.asarray(ids, np.int64)] == 0))

    def add(self, ids: npt.ArrayLike) -> None:
        """Hold blocks that a request, or the prefix cache, has now."""
        given = np.asarray(ids, np.int64)
        added = given[self._holders[given] == 0].tolist()
        self._holders[given] += 1
        self._count += len(added)
        self._pool.touch([self._pool.blocks[block] for block in added])

    def drop(self, ids: npt.ArrayLike) -> None:
        given = np.asarray(ids, np.int64)
        self._holders[given] -= 1
        # In reverse, as vLLM frees a request: the prefix cache keeps the beginning of a prompt the longest.
        left = given[self._holders[given] == 0][::-1].tolist()
        self._count -= len(left)
        self._pool.free_blocks([self._pool.blocks[block] for block in left])


def ids_of(blocks: Mapping[str, Blocks]) -> list[int]:
    """Return the ids of blocks of all groups."""
    return [block for listed in blocks.values() for block in listed.ids.tolist()]


_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's request_id of a sample: index and request_id of the parent (vllm/v1/engine/parallel_sampling.py,
`ParentRequest.get_child_info`; 0.32.0)."""


class ComputedPart(NamedTuple):
    """Blocks that are published when every rank has computed `step`."""

    step: int
    blocks: Mapping[str, Blocks]


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request that will be published, or the answer to another engine's question."""

    request_id: str
    request: Any
    """vLLM's request; None: it has finished, or this is an answer. It may have images, or embeddings of its whole
    prompt, which a publication must not keep."""
    reference: str = field(repr=False)  # the router's; empty: none, the request is published when it has finished
    prompt: Prompt  # at the request's arrival; of a finished request, with the published tokens of the answer
    holds: BlockHolds  # holds blocks of vLLM's pool
    step: int = 0  # the last step in which the request was scheduled
    follows: bool = False
    """The request is another sample of the same prompt (n > 1) as a request with the same reference, and only that
    request is published."""
    publication: Publication | None = None  # None: nothing is published yet
    held: list[int] = field(default_factory=list)  # ids of the blocks that are published or will be soon
    parts: deque[ComputedPart] = field(default_factory=deque)  # unpublished: some rank has not computed their step
    planned: dict[str, int] = field(default_factory=dict)  # end of the tokens published or in `parts`, by group
    closed: bool = False  # no more parts of the prompt are planned
    withdrawn: bool = False  # the publication has failed, was released early, or was withdrawn
    finished: bool = False  # by vLLM, so the blocks that were published, or will be, last are the last ones
    payload: bytes = b""  # of the publication; comes with its last blocks
    contents: tuple[object, ...] | None = None
    """`contents_of` the published tokens of a finished sample; None: of other requests."""
    question: Question | None = None  # None: it is a request
    computed_from: frozenset[int] = frozenset()  # ids of the blocks from which the blocks of an answer were computed

    @property
    def parent(self) -> str:
        """vLLM's request_id of the request of which this is a sample (n > 1); empty: it is no sample."""
        sample = _CHILD.fullmatch(self.request_id)
        return "" if sample is None else sample[1]

    def plan(
        self, tables: Sequence[BlockTable], block_ids: Callable[[str], Sequence[Sequence[int]]], tokens: int
    ) -> None:
        """Add the full blocks that have the first `tokens` tokens to `parts`; `block_ids` returns vLLM's, by group."""
        due = [
            table
            for table in tables
            if not table.forgets and tokens - self.planned.get(table.group.name, 0) >= table.entry_tokens
        ]
        if not due:
            return
        ids = block_ids(self.request_id)
        blocks: dict[str, Blocks] = {}
        for table in due:
            name = table.group.name
            found = table.early(ids[table.index], self.planned.get(name, 0), tokens)
            if len(found.ids):
                blocks[name] = found
                self.planned[name] = found.end_token or 0
        if blocks:
            # Held from now on, because vLLM may free the blocks before the step has ended.
            self.hold(blocks)
            self.parts.append(ComputedPart(self.step, blocks))

    def forget_parts(self) -> None:
        """Free the blocks of unpublished parts."""
        for part in reversed(self.parts):
            ids = ids_of(part.blocks)
            # They were held last.
            del self.held[len(self.held) - len(ids) :]
            self.holds.drop(ids)
            self.planned |= {name: listed.first_token for name, listed in part.blocks.items()}
        self.parts.clear()

    def rest(self, tables: Sequence[BlockTable], blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Return those of a finished request's blocks that are not planned yet, and hold them."""
        found = {
            table.group.name: table.rest(blocks[table.group.name], self.planned.get(table.group.name, 0))
            for table in tables
        }
        self.hold(found)
        return found

    def free(self) -> None:
        """Free all blocks. Idempotent."""
        ids, self.held = self.held, []
        self.holds.drop(ids)

    def hold(self, blocks: Mapping[str, Blocks]) -> None:
        ids = ids_of(blocks)
        self.holds.add(ids)
        self.held += ids


def contents_of(request: Any, tokens: int) -> tuple[object, ...] | None:
    """Return everything that the cache of the first `tokens` tokens depends on; None: the request does not show it."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    return (
        tuple(request.all_token_ids[:tokens]),
        request.cache_salt,
        None if adapter is None else (adapter.lora_int_id, adapter.lora_name),
    )
