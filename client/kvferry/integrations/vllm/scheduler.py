"""The connector in vLLM's scheduler process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.engine import Grant, ReadEnd, SchedulerPort
from kvferry.errors import KvferryError, PromptMismatch
from kvferry.integrations.remembered import remember
from kvferry.integrations.vllm.cached import Answers, PrefixCache
from kvferry.integrations.vllm.idle_steps import Engine, IdleSteps, Rest
from kvferry.integrations.vllm.loads import Load, Loads, Prefixes, log_failure
from kvferry.integrations.vllm.requests import (
    PREFIX_SOURCE,
    asks_for_source,
    is_routers,
    read_reference,
    traceparent_of,
)
from kvferry.integrations.vllm.sending import Sending, decline
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, Summed, WorkerNews

logger = logging.getLogger(__name__)

LEAST_TIME = 1.0
"""Seconds that a sample has to read if the sample that it followed has used up the time."""


class ConnectorScheduler:
    """Publishes the requests that prefill has finished, and acquires those that decode wants to read.

    vLLM alone decides whether a request whose read has failed is failed or computed (``kv_load_failure_policy``: "fail"
    or "recompute"). The connector never reads that setting: inside MultiConnector it would see its own value, which is
    "fail" by default, while vLLM follows MultiConnector's. So each failure is reported, and `told` and `finished` see
    from vLLM's next call whether another reader may still need the publication.

    `cache` is vLLM's prefix cache; `engine` is woken by questions; None: it cannot be woken.
    """

    def __init__(
        self, setup: Setup, cache: PrefixCache, engine: Engine | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._setup = setup
        self._cache = cache
        self._now = now
        settings = setup.settings
        self._client = settings.client()
        # vLLM frees or reuses the blocks of a failed read as soon as it learns of the failure.
        self._port = SchedulerPort(
            self._client,
            setup.spec,
            hold_until_quiet=True,
            # The home bounds the reads that wait there, and the port asks it again.
            max_waiting=sys.maxsize,
            timeout=settings.start_timeout,
        )
        self._stats = KvferryStats()
        self._sums: list[Summed] = []  # published blocks that the workers will sum, in integrity mode
        self._sending = Sending(setup, self._port, cache, self._sums, self._stats.count)
        self._answers = Answers(setup, self._port, cache, self._sending.answer)
        self._prefixes = Prefixes(setup, self._port, cache, self._client.directory, self._stats.count)
        self._idle = IdleSteps(self._port, setup.depth)
        self._rest = Rest(drains=setup.drains, now=now)
        self._loads = Loads()
        self._had: dict[str, None] = {}
        """References whose blocks are, or were, in vLLM's prefix cache. A sample that comes after its reference was
        forgotten asks for a publication that was released."""
        self._mistaken: dict[str, None] = {}  # references that came with another prompt than their publications'
        self._registered: set[int] = set()
        self._starts: list[Grant] = []
        self._incarnation = self._port.token.incarnation
        self._ends: list[ReadEnd] = []
        self._warned = False
        self._paused: Callable[[], bool] = (lambda: False) if engine is None else engine.paused
        if engine is not None and self._answers.possible:
            self._port.on_question(engine.wake)

    # The requests of decode.

    def on_new_request(self, request: Any) -> None:
        """Start to acquire the publication of an arrived request, or shorten its prompt if decode will compute the end
        of the prompt."""
        # vLLM may have rested, and will look for blocks for this request next.
        self._take_released()
        self._rest.did_something()
        self._sending.expect(request)
        self._cache.see(request)
        reference = read_reference(request)
        if not reference:
            self._ask(request)
            return
        if reference in self._had:
            # The publication was read for another sample, which has ended: vLLM has the blocks, or computes them.
            return
        if request.abort_immediately:
            # A notice of vLLM's API server that it has refused or failed a request, with a prompt of one token
            # (vllm/v1/engine/async_llm.py, `notify_kv_transfer_request_rejected`; 0.32.0).
            if reference not in self._mistaken and not self._loads.any_of(reference):
                decline(self._port, reference)
            return
        if not self._setup.reads:
            self._leave_unread(request, reference)
            return
        request_id = request.request_id
        until = self._now() + self._setup.settings.read_timeout
        load = Load(reference, until, traceparent_of(request))
        self._loads.add(request_id, load)
        if self._setup.caches_prefixes and self._loads.is_led(reference):
            # Another sample of the same prompt (n > 1): all samples have the reference of one publication, which is
            # released after its first read.
            load.follows = True
            return
        self._lead(request, load)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return the number of tokens to read after the first `computed`, or None if it is not known yet, and whether
        the read is asynchronous."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is None or load.reading:
            return 0, False
        if computed >= request.num_tokens - self._setup.recomputed:
            # No token of the publication is needed, whether it exists or not.
            return self._found_here(request_id, load)
        # vLLM calls this for each waiting request in each of its steps, so the rest runs only for requests with news.
        self._take_news()
        if load.waits and self._now() < load.until:
            return None, False
        matched = self._matched(request, load, computed)
        load.waits = matched is None
        return matched or (None, False)

    def _matched(self, request: Any, load: Load, computed: int) -> tuple[int, bool] | None:
        """Return the answer of `matched_tokens`; None: unknown until there is news."""
        request_id = request.request_id
        if load.follows:
            # vLLM may keep the other request waiting for as long as it likes, such as one of less priority.
            if self._loads.is_led(load.reference) and (load.prefix is None or self._now() < load.until):
                return None
            if load.found or load.prefix is not None:
                # vLLM has counted these blocks as computed; less than a block is left, but of a prefix.
                self._loads.remove(request_id)
                return 0, False
            load.follows = False
            self._lead(request, load)
        load.computed = computed
        offered = request.num_tokens
        if load.error is None:
            try:
                offer = self._port.granted(request_id)
            except KvferryError as error:
                if load.prefix is not None:
                    self._prefixes.missed(request_id, error)
                    self._loads.remove(request_id)
                    self._led(request_id)
                    return 0, False
                load.error = error
                return self._matched(request, load, computed)
            if offer is None:
                return None
            if offer.incarnation == self._incarnation:
                # This engine prefilled the request (kv_both). A complete publication is in vLLM's prefix cache, and
                # vLLM computes the tokens that are not.
                if self._setup.caches_prefixes and not offer.complete:
                    return None
                return self._found_here(request_id, load)
            offered -= self._setup.recomputed
            if offer.complete:
                offered = self._setup.readable(offer.blocks(), computed, offered)
            elif not self._setup.foreseeable(offer.blocks()):
                return None
        if offered <= computed:
            return self._found_here(request_id, load)
        return offered - computed, True

    def allocated(self, request_id: str, block_ids: tuple[list[int], ...], count: int) -> None:
        """Attach the blocks that vLLM has allocated for `count` tokens after the computed ones."""
        load = self._loads.get(request_id)
        if load is None:
            # vLLM is about to compute the request. If it was read, its blocks are in the prefix cache now.
            self._led(request_id, found=True)
            return
        if load.reading:
            return
        if count == 0:
            self._decline(request_id)
            return
        tokens = (load.computed, load.computed + count)
        blocks = self._setup.wanted(block_ids, tokens)
        load.reading = True
        if load.error is None:
            try:
                self._starts.append(self._port.attach(request_id, blocks, tokens))
                return
            except KvferryError as error:
                # The lease has ended, or the blocks were refused, so the request will not be read.
                load.error = error
                self._port.cancel(request_id)
        lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
        self._ends.append(ReadEnd(request_id, "", load.error, True, 0, 0, lost))

    # The end of a request, in prefill and decode.

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Handle the end of a request, and publish it if decode will read it. Return the ``kv_transfer_params`` for the
        router."""
        request_id = request.request_id
        self._rest.did_something()
        self._led(request_id)
        load = self._loads.get(request_id)
        if load is not None and load.failed:
            if request.status is RequestStatus.FINISHED_ERROR:
                # vLLM fails the request because its read has failed. Another engine may still read the publication.
                self._loads.remove(request_id)
        elif load is not None and load.reading:
            # vLLM itself keeps the blocks until the read has ended.
            load.aborted = True
            self._port.cancel(request_id)
        elif load is not None:
            self._decline(request_id)
        params = self._sending.finish(request, block_ids)
        if asks_for_source(request) and self._answers.possible:
            params = {**(params or {}), PREFIX_SOURCE: self._port.engine_reference}
        return params

    # In each step.

    def step(self, scheduled: Mapping[str, int]) -> StepMetadata:
        """Return the metadata of a step for the workers. `scheduled` has the number of tokens that the step computes,
        by request."""
        idle = not scheduled
        if self._take_released() or not idle:
            self._rest.did_something()
        self._take_news()
        step = self._sending.begin(scheduled)
        if self._answers.work(refuses=self._paused()):
            self._rest.did_something()
        registered = self._all_registered()
        reads, publishes, ready = bool(self._loads), self._publishes, bool((self._starts and registered) or self._ends)
        holds = self._sending.holding and self._rest.denied
        waits = self._idle.begin(idle=idle, reads=reads, publishes=publishes, ready=ready, holds=holds)
        metadata = StepMetadata(step, waits=waits, asks=self._publishes)
        if registered:
            metadata.starts, self._starts = self._starts, []
            # The steps of the grants that were attached until now.
            metadata.grant_steps = self._port.grant_steps()
            metadata.cancels = self._port.cancels()
            metadata.sums = self._sums.copy()
            self._sums.clear()
        else:
            metadata.token = str(self._port.token)
        ends, self._ends = [*self._ends, *self._port.finished().reads], []
        for end in ends:
            self._read_ended(end, metadata)
        return metadata

    def take_received(self) -> set[str]:
        """Return the requests whose reads have ended well since the begin of the step. Failures wait for the next step,
        because workers must name the blocks."""
        received = set()
        for end in self._port.finished().reads:
            if end.error is not None:
                self._ends.append(end)
                continue
            received.add(end.request_id)
            self._read(end)
        return received

    def told(self, received: Iterable[str]) -> None:
        """Handle reads whose ends vLLM has received. vLLM has failed requests by now, if it fails them."""
        for request_id in received:
            load = self._loads.get(request_id)
            if load is not None and load.failed:
                self._loads.remove(request_id)
                if load.prefix is not None:
                    self._prefixes.compute(load.prefix)
                else:
                    # vLLM has not failed the request, so vLLM computes it, or it was aborted: the publication is not
                    # needed.
                    self._give_back(load)

    def collect(self, news: WorkerNews | None, lost: Iterable[int] = ()) -> None:
        """Take the news of the workers, if any, and the blocks that some connector has reported lost. Raises
        `KvferryError` if a rank cannot be registered."""
        # First, because blocks that were computed from lost ones must not be published.
        if lost:
            self._sending.lost(lost)
        if news is None:
            return
        self._registered |= news.registered
        for rank, problem in news.errors.items():
            raise KvferryError(f"rank {rank} cannot register its cache: {problem}")
        for output in news.outputs:
            self._port.collect(output)
        self._sending.computed(news.done())

    def has_work(self) -> bool:
        """Return whether vLLM must run steps even without a request: workers are being registered, or must report the
        progress of their devices, or readers are likely to end soon, see `Rest`."""
        if not self._all_registered() or self._publishes or self._sums:
            return True
        if self._sending.holding:
            # While vLLM rests, only this call takes releases, and vLLM makes this call before it pauses.
            self._take_released()
        # This call alone takes questions, too.
        paused = self._paused()
        if self._answers.work(refuses=paused):
            self._rest.did_something()
        if self._publishes or self._sums:
            return True
        if paused:
            # vLLM completes a pause when there is no work, and then no block may be held.
            return self._sending.holding
        return not self._rest.may_rest(holding=self._sending.holding)

    def take_stats(self) -> KvferryStats | None:
        """Return the counts since the last call; None: there are none."""
        stats = KvferryStats(self._stats.data)
        self._stats.reset()
        return None if stats.is_empty() else stats

    def close(self) -> None:
        self._port.close()
        self._client.close()

    # Internal.

    def _take_released(self) -> bool:
        """Free the blocks of released publications; return whether there were any."""
        releases = self._port.released()
        self._sending.released(releases)
        return bool(releases)

    @property
    def _publishes(self) -> bool:
        """Whether blocks wait to be published."""
        return self._sending.waiting or self._answers.waiting

    def _all_registered(self) -> bool:
        return len(self._registered) == self._setup.spec.num_ranks

    def _leave_unread(self, request: Any, reference: str) -> None:
        """Decline a request to read at an engine that only publishes: the engine computes the prompt. vLLM may reuse
        blocks of a producer to which a step still writes, and the engine has no reading agents, which must be made
        before graphs are captured."""
        self._stats.count("not_granted")
        if not self._warned:
            self._warned = True
            logger.warning(
                "engine %s is asked to read requests, and its role is prefill, by kv_role or role: it computes them. "
                "Give kv_role kv_consumer and role both to engines that others read from and that read, too",
                self._setup.spec.engine_id,
            )
        decline(self._port, reference, self._sending.prompt(request))

    def _ask(self, request: Any) -> None:
        """Ask for the prefix of a request, unless another request of the same prompt, such as a sample, asks for it."""
        load = self._prefixes.wanted(request, self._sending.prompt)
        if load is None:
            return
        load.follows = self._setup.caches_prefixes and self._loads.is_led(load.reference)
        if load.follows:
            self._loads.add(request.request_id, load)
        elif self._prefixes.ask(load):
            self._loads.add(request.request_id, load)
            self._loads.lead(request.request_id, load)

    def _lead(self, request: Any, load: Load) -> None:
        """Acquire the publication of a request. Others of the same reference follow it. The request has only its
        prompt: it is read before vLLM computes any token, and never again, even if vLLM preempts it later."""
        request_id = request.request_id
        load.prompt = self._sending.prompt(request)
        self._loads.lead(request_id, load)
        # The time counts from the arrival: the request may have followed another that waited in vain.
        left = max(min(LEAST_TIME, self._setup.settings.read_timeout), load.until - self._now())
        try:
            self._port.acquire(
                request_id,
                load.reference,
                progressive=is_routers(load.reference),
                timeout=left,
                traceparent=load.traceparent,
                prompt=load.prompt,
            )
        except KvferryError as error:
            # Reported when vLLM has allocated blocks.
            load.error = error

    def _take_news(self) -> None:
        for request_id in self._port.news():
            if (load := self._loads.get(request_id)) is not None:
                load.waits = False

    def _led(self, request_id: str, *, found: bool = False) -> None:
        """Wake the followers of a request. `found`: its blocks were read and are in the prefix cache; if not, the first
        follower reads them."""
        reference = self._loads.end_lead(request_id, found=found)
        if reference and found:
            self._has(reference)

    def _has(self, reference: str) -> None:
        if self._setup.caches_prefixes:
            remember(self._had, reference, None)

    def _found_here(self, request_id: str, load: Load) -> tuple[int, bool]:
        """Decline a request of which vLLM has all readable tokens; return the answer of `matched_tokens`."""
        self._decline(request_id)
        if load.error is None and not load.follows and load.prefix is None:
            self._has(load.reference)
        return 0, False

    def _decline(self, request_id: str) -> None:
        load = self._loads.remove(request_id)
        if load.follows:
            return
        self._led(request_id)
        if load.prefix is None:
            # Before `cancel`, with which the port forgets the publication.
            self._give_back(load)
        self._port.cancel(request_id)

    def _give_back(self, load: Load) -> None:
        """Decline a publication, unless another request here may still read it, or it is of another prompt, whose own
        reader may still come."""
        if not isinstance(load.error, PromptMismatch) and not self._loads.any_of(load.reference):
            load.error = decline(self._port, load.reference, load.prompt) or load.error

    def _read_ended(self, end: ReadEnd, metadata: StepMetadata) -> None:
        request_id = end.request_id
        load = self._loads[request_id]
        metadata.received.add(request_id)
        if end.error is None:
            self._read(end)
            return
        self._stats.read_ended(end, granted=load.error is None)
        load.error = end.error
        if isinstance(end.error, PromptMismatch):
            remember(self._mistaken, load.reference, None)
        self._led(request_id)
        log_failure(end, load.reference, self._setup.spec.engine_id, aborted=load.aborted)
        load.failed = True
        if load.aborted or load.prefix is not None:
            return
        if len(self._setup.spec.groups) == 1 and any(end.lost.values()):
            metadata.lost.update(*end.lost.values())
        else:
            metadata.failed.add(request_id)

    def _read(self, end: ReadEnd) -> None:
        self._stats.read_ended(end, granted=True)
        # Followers wait until the blocks are in vLLM's prefix cache, see `allocated`.
        self._loads.remove(end.request_id)
