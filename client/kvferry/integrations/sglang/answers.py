"""Answers the questions of other engines for the KV of a prompt's beginning, from SGLang's radix cache."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvferry import Blocks, MissReason, Prompt, Publication, Question
from kvferry.errors import KvferryError
from kvferry.integrations.sglang.manager import KvferryManager

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 18
"""Tokens after which a step leaves further questions to the next one; a question has at most about as many."""


def spare_tokens(scheduler: Any) -> int:
    """Return for how many tokens SGLang has room beside a prompt that it computes in parts; less than 0: not even for
    that. SGLang counts the room for such a prompt once, computes each part whether there is room or not, and ends if
    there is none (``PrefillBudget.available_chunk_tokens``; 0.5.23)."""
    tree, chunked = scheduler.tree_cache, scheduler.chunked_req
    needed = 0 if chunked is None else len(chunked.origin_input_ids) + int(tree.page_size)
    return int(scheduler.token_to_kv_pool_allocator.available_size() + tree.evictable_size()) - needed


def keeps_pages(tree: Any) -> bool:
    """Return whether SGLang's cache keeps pages, and only on the device: one that is moved to and from host memory or
    another store may still be on its way."""
    simple = type(tree) in (RadixCache, UnifiedRadixCache) and tree.supports_prefix_sharing()
    return bool(simple and tree.cache_controller is None and getattr(tree, "linker", None) is None)


def open_batches(scheduler: Any) -> tuple[object, ...]:
    """Return SGLang's batches whose results are to come: the device may still compute them."""
    return tuple(result for _, result in scheduler.result_queue)


def any_open(batches: tuple[object, ...], scheduler: Any) -> bool:
    """Return whether the result of one of these batches is to come."""
    computing = set(map(id, open_batches(scheduler)))
    return any(id(batch) in computing for batch in batches)


@dataclass(frozen=True, slots=True)
class RadixLookup:
    """A prompt that every rank looks up."""

    number: int  # of the lookup
    tokens: array[int]  # as SGLang keeps them
    namespace: str | None  # SGLang's ``extra_key`` of the requests that share such a cache; None: without one
    first_token: int  # what lies before it is not asked for


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache has of a prompt from its first token on, in whole pages, and SGLang's lock on it."""

    slots: Any  # of each token, in the pool of full attention, on SGLang's device
    pages: npt.NDArray[np.int64]  # of all tokens, in the pool of full attention
    lock: Any


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """What every rank does next, by the decision of rank 0. It takes the way of SGLang's requests from rank to rank, so
    that all ranks do it between the same two batches."""

    lookups: tuple[RadixLookup, ...]
    freed: tuple[int, ...]
    """Numbers of lookups whose pages are held no longer."""


@dataclass(frozen=True, slots=True)
class _RadixAnswer:
    """An answer on rank 0. It is published when none of its batches is open: SGLang adds what a batch computes to its
    cache before the device has computed it."""

    number: int
    question: Question
    blocks: dict[str, Blocks]
    batches: tuple[object, ...]


class RadixAnswers:
    """Answers questions on all ranks of prefill: rank 0 has them, and publishes.

    Every rank makes the same calls of SGLang's radix cache in the same order, since each changes what SGLang evicts
    next, which must be the same on all ranks. Without a cache that `keeps_pages`, every question is a miss.
    """

    def __init__(self, scheduler: Any, manager: KvferryManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._tree = scheduler.tree_cache
        self._possible = manager.prefix_share > 0 and keeps_pages(self._tree)
        pages = manager.pools.groups[0].num_blocks
        self._most = int(pages * manager.prefix_share)
        self._holders = np.zeros(pages, np.int64)
        """How many held prompts have each page. Thousands may have the same beginning."""
        self._held: dict[int, Held] = {}
        """By the number of the lookup; the same on all ranks."""
        self._number = 0
        self._open: deque[Question] = deque()
        self._asked: dict[int, Question] = {}
        """Questions of lookups that are under way to the ranks."""
        self._found: list[_RadixAnswer] = []
        self._published: dict[int, Publication] = {}
        self._freed: list[int] = []

    @property
    def holding(self) -> bool:
        """Whether pages are held. The same on all ranks."""
        return bool(self._held)

    # On rank 0.

    def next_step(self) -> AnswerStep | None:
        """Return what every rank does next; None: nothing. Called whenever SGLang takes requests."""
        self._publish()
        for number, publication in [*self._published.items()]:
            if self._manager.take_release(publication) is not None:
                del self._published[number]
                self._freed.append(number)
        lookups = self._lookups()
        freed, self._freed = tuple(self._freed), []
        return AnswerStep(lookups, freed) if lookups or freed else None

    def _lookups(self) -> tuple[RadixLookup, ...]:
        """Return what the ranks shall look up, and answer what they need not."""
        questions = self._manager.port.questions()
        if questions:
            # Ended ones must not wait for their turn: each may have 1 MiB.
            self._open = deque(question for question in self._open if question.open)
            self._open += questions
        found: list[RadixLookup] = []
        left = MOST_TOKENS
        while self._open and left > 0:
            question = self._open.popleft()
            if not question.open:
                continue
            prompt = question.prompt
            namespace = self._manager.adapters.get(prompt.adapter) if prompt.adapter else None
            if not self._possible or (prompt.adapter and namespace is None):
                self._manager.port.miss(question, MissReason.UNSUPPORTED)
                continue
            self._number += 1
            self._asked[self._number] = question
            found.append(RadixLookup(self._number, _tokens(prompt), namespace, question.first_token))
            left -= len(found[-1].tokens)
        return tuple(found)

    def _answer(self, number: int, held: Held | MissReason) -> None:
        question = self._asked.pop(number)
        if isinstance(held, MissReason):
            self._manager.port.miss(question, held)
            return
        blocks = self._blocks(held, question.first_token)
        self._found.append(_RadixAnswer(number, question, blocks, open_batches(self._scheduler)))

    def _blocks(self, held: Held, first_token: int) -> dict[str, Blocks]:
        page = int(self._manager.kv_args.page_size)
        tokens, first = len(held.pages) * page, first_token // page
        states = []
        if self._manager.pools.window:
            # As SGLang's prefill hands windows over (``_swa_payload`` in sglang/srt/disaggregation/prefill.py; 0.5.23).
            begin = max(0, tokens - int(self._scheduler.sliding_window_size)) // page * page
            allocator = self._scheduler.token_to_kv_pool_allocator
            windowed = allocator.translate_swa_indices_for_transfer(held.slots[begin:])
            states = [kv_to_page_indices(windowed, page)]
        return self._manager.blocks(held.pages[first:].astype(np.int32), states, first * page, tokens)

    def _publish(self) -> None:
        """Publish the answers whose batches are computed."""
        found, self._found = self._found, []
        for answer in found:
            question = answer.question
            if any_open(answer.batches, self._scheduler):
                self._found.append(answer)
                continue
            try:
                if question.open:
                    self._published[answer.number] = self._manager.publish(
                        question.reference, f"prefix-{question.number}", answer.blocks, b"", question.prompt
                    )
            except KvferryError as error:
                logger.info("question %d could not be answered: %s", question.number, error)
            if answer.number not in self._published:
                self._freed.append(answer.number)

    # On every rank.

    def run(self, step: AnswerStep) -> None:
        """Do what rank 0 has decided. SGLang calls this for the step as for a request."""
        for number in step.freed:
            self._free(self._held.pop(number))
        for lookup in step.lookups:
            # A paused engine may get other weights, and empties its cache first.
            held = MissReason.BUSY if self._scheduler._engine_paused else self._hold(lookup)
            if isinstance(held, Held) and spare_tokens(self._scheduler) < 0:
                self._free(held)
                held = MissReason.BUSY
            if isinstance(held, Held):
                self._held[lookup.number] = held
            if self._manager.leader:
                self._answer(lookup.number, held)
        if self._manager.leader:
            self._publish()

    def _hold(self, lookup: RadixLookup) -> Held | MissReason:
        """Look up a prompt, and hold what the cache has of it, if that reaches behind the first token wanted. SGLang
        does not evict the pages until `_free`."""
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(lookup.tokens, lookup.namespace)))
        tokens = int(match.device_prefix_len)
        if tokens <= lookup.first_token:
            return MissReason.NOT_CACHED
        slots = self._tree.path_device_indices(match.last_device_node)[:tokens]
        # Waits for the device, as SGLang does for the pages of each request that it sends.
        pages = kv_to_page_indices(slots, self._tree.page_size).astype(np.int64)
        if np.count_nonzero(self._holders) + np.count_nonzero(self._holders[pages] == 0) > self._most:
            return MissReason.BUSY
        self._holders[pages] += 1
        return Held(slots, pages, self._tree.lock(match.last_device_node))

    def _free(self, held: Held) -> None:
        """Let SGLang evict the pages, unless others hold them."""
        self._holders[held.pages] -= 1
        self._tree.unlock(held.lock)


def _tokens(prompt: Prompt) -> array[int]:
    """Return the tokens of a prompt as SGLang keeps them, up to the first input: in its place, SGLang has its own
    hashes."""
    end = min((len(prompt), *(each.offset for each in prompt.inputs)))
    tokens = array("q")
    tokens.frombytes(prompt.token_ids[:end].astype(np.int64).tobytes())
    return tokens
