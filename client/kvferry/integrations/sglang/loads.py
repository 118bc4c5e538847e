"""Asks the engines that requests of prefill name for what SGLang's radix cache lacks of their prompts."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, kv_to_page_indices
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvferry import Blocks, Prompt
from kvferry.engine import Grant, ReadEnd
from kvferry.errors import KvferryError
from kvferry.integrations.sglang.answers import any_open, keeps_pages, open_batches, spare_tokens
from kvferry.integrations.sglang.manager import PREFIX_SOURCE, KvferryManager
from kvferry.integrations.sglang.pools import FULL

logger = logging.getLogger(__name__)

MOST_LOADS = 64
"""Prefixes that are wanted at once; further requests are computed."""

MOST_TIME = 30.0
"""Most seconds for the read of a prefix. Then the request is computed."""


@dataclass(frozen=True, slots=True)
class LoadStep:
    """What every rank does next for loads, by the decision of rank 0; see `AnswerStep`. Loads have numbers."""

    rooms: tuple[tuple[int, int], ...] = ()  # loads that need pages, each with the end of its tokens
    grants: tuple[Grant, ...] = ()  # for each rank's worker
    cancels: tuple[str, ...] = ()  # read_ids of shares to cancel
    failed: tuple[int, ...] = ()  # their requests wait no longer, while their pages may still be written to (R4)
    ends: tuple[tuple[int, bool], ...] = ()  # loads that have ended, and whether their bytes count
    reports: bool = False  # rank 0 needs the reports of all workers


@dataclass(slots=True)
class _Load:
    """A prefix that is wanted, on each rank."""

    tokens: array[int]  # of the whole prompt, as SGLang keeps it
    namespace: str | None
    first: int  # tokens from here on are not cached here
    last: int  # tokens from here on are computed in any case
    own: Any  # the slots of what is cached here, which `lock` keeps
    lock: Any
    slots: Any = None  # of the tokens behind, once there is room; up to `end`
    end: int = 0
    waits: bool = True  # whether the request waits for it


class RadixLoads:
    """Reads what requests of prefill lack in SGLang's radix cache, on all ranks, and lets SGLang compute the rest. No
    request fails by it.

    A request waits in SGLang's bootstrap queue meanwhile. Every rank takes the same pages from SGLang, and adds them to
    its cache when the bytes of all ranks have come; SGLang then finds them there.
    """

    def __init__(self, scheduler: Any, manager: KvferryManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._worker = manager.worker
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page = int(self._tree.page_size)
        self._loads: dict[int, _Load] = {}
        """By numbers that are the same on all ranks."""
        self._number = 0
        # On rank 0, loads by what they wait for: an answer, batches that may still write to their pages, bytes.
        self._asked: set[int] = set()
        self._computing: dict[int, tuple[object, ...]] = {}
        self._reading: set[int] = set()
        self._failed: list[int] = []
        self._ends: list[tuple[int, bool]] = []

    @staticmethod
    def possible(scheduler: Any, manager: KvferryManager) -> bool:
        """Whether SGLang's cache takes what was read."""
        tree = scheduler.tree_cache
        return type(tree) is UnifiedRadixCache and keeps_pages(tree) and not manager.pools.window

    @property
    def holding(self) -> bool:
        """Whether pages are held. The same on all ranks."""
        return bool(self._loads)

    def waits(self, number: int) -> bool:
        """Whether the request of a load waits for it. The same on all ranks."""
        return number in self._loads and self._loads[number].waits

    def want(self, request: Any, prompt: Prompt) -> int:
        """Begin to load what a new request lacks, if it names an engine that may have it; return the number of the
        load, or 0. Called on all ranks for the same requests in the same order."""
        source = (request.sampling_params.custom_params or {}).get(PREFIX_SOURCE)
        # A `Prompt` has neither salt nor key.
        others = request.cache_salt or (request.extra_key or None) != (request.lora_id or None)
        if not isinstance(source, str) or not source or others or not prompt or len(self._loads) >= MOST_LOADS:
            return 0
        tokens = array("q", request.origin_input_ids)
        # SGLang computes the last token in any case.
        last = (len(tokens) - 1) // self._page * self._page
        key = RadixKey(tokens[:last], request.extra_key)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        first = int(match.device_prefix_len)
        if first >= min(last, prompt.known):
            return 0
        own = self._tree.path_device_indices(match.last_device_node)[:first]
        lock = self._tree.lock(match.last_device_node)
        if spare_tokens(self._scheduler) < 0:
            self._tree.unlock(lock)
            return 0
        self._number += 1
        self._loads[self._number] = _Load(tokens, request.extra_key, first, last, own, lock)
        if self._manager.leader:
            self._ask(self._number, source, prompt, first)
        return self._number

    # On rank 0.

    def _ask(self, number: int, source: str, prompt: Prompt, first: int) -> None:
        if source == self._manager.port.engine_reference:
            self._ended(number)
            return
        wait = self._manager.prefix_wait
        try:
            self._manager.port.ask(str(number), source, prompt, first_token=first, wait=wait, timeout=MOST_TIME)
        except KvferryError as error:
            self._missed(number, error)
        else:
            self._asked.add(number)

    def _missed(self, number: int, error: KvferryError) -> None:
        logger.debug("no prefix is read: %s", error)
        self._ended(number)

    def _ended(self, number: int, *, counts: bool = False) -> None:
        """End a load, whose pages are quiet, in the next step. `counts`: its bytes do."""
        self._asked.discard(number)
        self._reading.discard(number)
        self._ends.append((number, counts))

    def next_step(self) -> LoadStep | None:
        """Return what every rank does next; None: nothing. Called whenever SGLang takes requests."""
        if not self._loads:
            return None
        news = map(int, self._manager.port.news())
        rooms = tuple((number, end) for number in news if (end := self._granted(number)))
        grants = self._attached()
        cancels = tuple(self._manager.port.cancels())
        finished = self._manager.port.finished()
        for read in finished.reads:
            self._finished(read)
        for request_id in finished.quiesced:
            self._ended(int(request_id))
        failed, self._failed = tuple(self._failed), []
        ends, self._ends = tuple(self._ends), []
        step = LoadStep(rooms, grants, cancels, failed, ends, reports=bool(self._reading))
        self._manager.breathe()
        return None if step == LoadStep() else step

    def _granted(self, number: int) -> int:
        """Return the end of the tokens of a load if it was granted now; 0: it was not."""
        if number not in self._asked:
            return 0
        try:
            offer = self._manager.port.granted(str(number))
        except KvferryError as error:
            self._missed(number, error)
            return 0
        if offer is None:
            return 0
        self._asked.remove(number)
        load = self._loads[number]
        end = min(offer.blocks()[FULL].end_token or 0, load.last) // self._page * self._page
        if end > load.first:
            return end
        self._manager.port.cancel(str(number))
        self._ended(number)
        return 0

    def _attached(self) -> tuple[Grant, ...]:
        """Return the grants of loads whose pages no batch writes to any more: a read is not ordered after SGLang's work
        on the device."""
        found = []
        for number, batches in [*self._computing.items()]:
            if any_open(batches, self._scheduler):
                continue
            del self._computing[number]
            load = self._loads[number]
            blocks = {FULL: Blocks(kv_to_page_indices(load.slots, self._page), load.first)}
            try:
                found.append(self._manager.port.attach(str(number), blocks, (load.first, load.end)))
            except KvferryError as error:
                self._manager.port.cancel(str(number))
                self._missed(number, error)
            else:
                self._reading.add(number)
        return tuple(found)

    def _finished(self, end: ReadEnd) -> None:
        if end.quiet:
            self._ended(int(end.request_id), counts=end.error is None)
        else:
            self._failed.append(int(end.request_id))
        if end.error is None:
            self._manager.counts.read_done(end)
        else:
            self._manager.counts.read_failed(type(end.error).__name__)
            logger.warning("a prefix could not be read: %s: %s", type(end.error).__name__, end.error)

    # On every rank.

    def run(self, step: LoadStep) -> None:
        """Do what rank 0 has decided. SGLang calls this for the step as for a request."""
        if step.reports:
            outputs = self._manager.gathered(self._worker.finished())
            if self._manager.leader:
                for output in outputs:
                    self._manager.port.collect(output)
        for number in step.failed:
            self._loads[number].waits = False
        for number, counts in step.ends:
            self._end(self._loads.pop(number), counts)
        for number, end in step.rooms:
            self._make_room(number, end)
        for grant in step.grants:
            try:
                self._worker.start(grant)
            except KvferryError as error:
                # The read ends when its time is over, as one whose rank is silent.
                logger.warning("a prefix could not be read: %s: %s", type(error).__name__, error)
        for read_id in step.cancels:
            self._worker.cancel(read_id)

    def _make_room(self, number: int, end: int) -> None:
        """Take pages for a load, if there is room."""
        load = self._loads[number]
        wanted = end - load.first
        if spare_tokens(self._scheduler) >= wanted:
            evict_from_tree_cache(self._tree, wanted)
            load.slots = self._allocator.alloc(wanted)
        load.end = end
        if not self._manager.leader:
            return
        if load.slots is None:
            self._manager.port.cancel(str(number))
            self._ended(number)
        else:
            self._computing[number] = open_batches(self._scheduler)

    def _end(self, load: _Load, counts: bool) -> None:
        if counts:
            slots = torch.cat((load.own, load.slots)).to(torch.int64)
            key = RadixKey(load.tokens[: load.end], load.namespace)
            # What has come into the cache meanwhile stays, and is freed here.
            self._tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=load.first))
        elif load.slots is not None:
            self._allocator.free(load.slots)
        self._tree.unlock(load.lock)
