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
from kvferry.engine import Grant, ReadEnd, SchedulerPort
from kvferry.errors import KvferryError
from kvferry.integrations.sglang.answers import keeps_pages, spare_tokens
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

    @property
    def _port(self) -> SchedulerPort:
        return self._manager.port

    def _ask(self, number: int, source: str, prompt: Prompt, first: int) -> None:
        if source == self._port.engine_reference:
            self._ends.append((number, False))
            return
        wait = self._manager.prefix_wait
        try:
            self._port.ask(str(number), source, prompt, first_token=first, wait=wait, timeout=MOST_TIME)
        except KvferryError as error:
            self._missed(number, error)
        else:
            self._asked.add(number)

    def _missed(self, number: int, error: KvferryError) -> None:
        logger.debug("no prefix is read: %s", error)
        self._ends.append((number, False))

    def next_step(self) -> LoadStep | None:
        """Return what every rank does next; None: nothing. Called whenever SGLang takes requests."""
        if not self._loads:
            return None
        rooms = [room for request_id in self._port.news() for room in self._granted(int(request_id))]
        grants = self._attached()
        cancels = tuple(self._port.cancels())
        finished = self._port.finished()
        for end in finished.reads:
            self._finished(end)
        for request_id in finished.quiesced:
            self._quiet(int(request_id), counts=False)
        failed, self._failed = tuple(self._failed), []
        ends, self._ends = tuple(self._ends), []
        step = LoadStep(tuple(rooms), grants, cancels, failed, ends, reports=bool(self._reading))
        self._manager.breathe()
        return None if step == LoadStep() else step

    def _granted(self, number: int) -> list[tuple[int, int]]:
        """Return a load that was granted now, with the end of its tokens."""
        if number not in self._asked:
            return []
        try:
            offer = self._port.granted(str(number))
        except KvferryError as error:
            self._asked.remove(number)
            self._missed(number, error)
            return []
        if offer is None:
            return []
        self._asked.remove(number)
        load = self._loads[number]
        end = min(offer.blocks()[FULL].end_token or 0, load.last) // self._page * self._page
        if end > load.first:
            return [(number, end)]
        self._port.cancel(str(number))
        self._ends.append((number, False))
        return []

    def _attached(self) -> tuple[Grant, ...]:
        """Return the grants of loads whose pages no batch writes to any more: a read is not ordered after SGLang's work
        on the device."""
        computing = {id(result) for _, result in self._scheduler.result_queue}
        found = []
        for number, batches in [*self._computing.items()]:
            if any(id(batch) in computing for batch in batches):
                continue
            del self._computing[number]
            load = self._loads[number]
            pages = kv_to_page_indices(load.slots, self._page)
            blocks = {FULL: Blocks(pages, load.first)}
            try:
                found.append(self._port.attach(str(number), blocks, (load.first, load.end)))
            except KvferryError as error:
                self._port.cancel(str(number))
                self._missed(number, error)
            else:
                self._reading.add(number)
        return tuple(found)

    def _finished(self, end: ReadEnd) -> None:
        number = int(end.request_id)
        if end.quiet:
            self._quiet(number, counts=end.error is None)
        else:
            self._failed.append(number)
        counts = self._manager.counts
        counts.add("reads.outcomes", "done" if end.error is None else "failed")
        if end.error is None:
            counts.add("reads.prompts", end.prompt)
            counts.add("ranks.bytes", by=end.bytes)
        else:
            counts.add("reads.failures", type(end.error).__name__)
            logger.warning("a prefix could not be read: %s: %s", type(end.error).__name__, end.error)

    def _quiet(self, number: int, *, counts: bool) -> None:
        self._reading.discard(number)
        self._ends.append((number, counts))

    # On every rank.

    def run(self, step: LoadStep) -> None:
        """Do what rank 0 has decided. SGLang calls this for the step as for a request."""
        if step.reports:
            outputs = self._manager.gathered(self._worker.finished())
            if self._manager.leader:
                for output in outputs:
                    self._port.collect(output)
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
            self._port.cancel(str(number))
            self._ends.append((number, False))
        else:
            self._computing[number] = tuple(result for _, result in self._scheduler.result_queue)

    def _end(self, load: _Load, counts: bool) -> None:
        if counts:
            slots = torch.cat((load.own, load.slots)).to(torch.int64)
            key = RadixKey(load.tokens[: load.end], load.namespace)
            # What has come into the cache meanwhile stays, and is freed here.
            self._tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=load.first))
        elif load.slots is not None:
            self._allocator.free(load.slots)
        self._tree.unlock(load.lock)
