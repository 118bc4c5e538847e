"""The connector in vLLM's scheduler process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Prompt
from kvferry.engine import Grant, ReadEnd, SchedulerPort
from kvferry.errors import KvferryError, PromptMismatch
from kvferry.integrations.vllm.idle_steps import IdleSteps, Rest
from kvferry.integrations.vllm.loads import Load, Loads
from kvferry.integrations.vllm.outgoing import BlockIds
from kvferry.integrations.vllm.params import is_routers, read_reference, traceparent_of
from kvferry.integrations.vllm.remembered import Remembered
from kvferry.integrations.vllm.sending import Sending
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.sources import NewSources, Turns, log_failure
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews

logger = logging.getLogger(__name__)

LEAST_TIME = 1.0
"""Seconds that a sample has to read if the one that it followed has used up their time."""


MOST_HAD = 1024
"""References that are remembered of requests whose blocks vLLM has. A sample that comes after it was forgotten asks for
a publication that was released. As many are remembered of those that came with another prompt."""


class ConnectorScheduler:
    """Publishes the requests that prefill has finished, and acquires those that decode wants to read.

    What becomes of a request whose read fails is vLLM's decision alone (``kv_load_failure_policy``: "fail" or
    "recompute"). The connector never looks at that setting: inside MultiConnector it would see its own, which is "fail"
    unless it is written there too, while vLLM follows MultiConnector's. So each failure is reported, and `_told` learns
    from what vLLM does next whether the publication is still of use to somebody.
    """

    def __init__(self, setup: Setup, now: Callable[[], float] = time.monotonic) -> None:
        self._setup = setup
        self._now = now
        settings = setup.settings
        self._client = settings.client()
        # vLLM frees or reuses the blocks of a failed read as soon as it learns of the failure.
        self._port = SchedulerPort(
            self._client,
            setup.spec,
            hold_until_quiet=True,
            # `Turns` bounds them, for each source.
            max_waiting=sys.maxsize,
            timeout=settings.start_timeout,
        )
        self._stats = KvferryStats()
        self._sending = Sending(setup, self._port, lambda name: self._stats.count(name))
        self._idle = IdleSteps(self._port, setup.depth)
        self._rest = Rest(drains=setup.drains, now=now)
        self._sent: set[str] = set()
        """Requests whose blocks vLLM keeps and may free."""
        self._loads = Loads()
        self._turns = Turns(settings.max_waiting)
        self._had = Remembered[str](MOST_HAD)
        """References of which vLLM has the blocks in its prefix cache, or had them."""
        self._mistaken = Remembered[str](MOST_HAD)
        """References that came with another prompt than that of their publications."""
        self._registered: set[int] = set()
        self._starts: list[Grant] = []
        self._incarnation = self._port.token.incarnation
        self._sources = NewSources(self._incarnation)
        self._ends: list[ReadEnd] = []
        self._warned = False

    def bind(self, pool: Any, block_ids: BlockIds) -> None:
        """Take vLLM's block pool, and what returns the blocks of a request, by group."""
        self._sending.bind(pool, block_ids)

    # The requests of decode.

    def on_new_request(self, request: Any) -> None:
        """Start to acquire the publication of a request that has arrived, or shorten its prompt if decode will compute
        the end of it."""
        # vLLM may have rested, and looks for blocks for this request first.
        self._take_released()
        self._rest.did_something()
        self._sending.expect(request)
        reference = read_reference(request)
        if not reference or reference in self._had:
            # It was read for another sample, which has ended already: vLLM has its blocks, or computes them.
            return
        if getattr(request, "abort_immediately", False):
            # No request: vLLM's API server has refused or failed one, and says so in this way, with a prompt of one
            # token (vllm/v1/engine/async_llm.py, `notify_kv_transfer_request_rejected`; 0.32.0).
            if reference not in self._mistaken and not self._loads.any_of(reference):
                self._decline_reference(reference)
            return
        if not self._setup.reads:
            self._leave_unread(request, reference)
            return
        request_id = request.request_id
        until = self._now() + self._setup.settings.read_timeout
        load = Load(reference, until, traceparent_of(request))
        self._loads.add(request_id, load)
        if self._setup.caches_prefixes and self._loads.is_led(reference):
            # Another sample of the same prompt (n > 1): all of them have the reference of one publication, which is
            # released after its first read.
            load.follows = True
            return
        self._lead(request, load)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` will be read, or None if that is not known yet, and whether
        the read is asynchronous."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is None or load.reading:
            return 0, False
        if computed >= request.num_tokens - self._setup.recomputed:
            # Whatever the publication has, or whether there is one: nothing of it is needed.
            return self._found_here(request_id, load)
        # vLLM asks for each request that waits in each of its steps, so the rest is done for those of which there is
        # news.
        self._take_news()
        if load.waits:
            return None, False
        matched = self._matched(request, load, computed)
        load.waits = matched is None
        return matched or (None, False)

    def _matched(self, request: Any, load: Load, computed: int) -> tuple[int, bool] | None:
        """Return the answer of `matched_tokens`; None: nothing is known until there is news."""
        request_id = request.request_id
        if load.follows:
            if self._loads.is_led(load.reference):
                return None
            if load.found:
                # vLLM has counted the blocks among the computed ones; what is left is less than a block.
                self._loads.pop(request_id)
                return 0, False
            load.follows = False
            self._lead(request, load)
        if self._turns.waits(request_id):
            return None
        load.computed = computed
        offered = request.num_tokens
        if load.error is None:
            try:
                offer = self._port.granted(request_id)
            except KvferryError as error:
                self._refuse(request_id, error)
                return self._matched(request, load, computed)
            if offer is None:
                return None
            self._turns.end(request_id)
            if offer.incarnation == self._incarnation:
                # This engine prefilled it (kv_both). vLLM has it in its prefix cache once it is complete, and computes
                # what it does not find there.
                if self._setup.caches_prefixes and not offer.complete:
                    return None
                return self._found_here(request_id, load)
            readable = self._setup.readable(offer.blocks(), computed, request.num_tokens, complete=offer.complete)
            if readable is None:
                return None
            offered = readable
        if offered <= computed:
            return self._found_here(request_id, load)
        return offered - computed, True

    def allocated(self, request_id: str, block_ids: tuple[list[int], ...], count: int) -> None:
        """Attach the blocks that vLLM has allocated for `count` tokens after the computed ones."""
        load = self._loads.get(request_id)
        if load is None:
            # It is about to be computed. If it was read, vLLM has put its blocks into the prefix cache just now.
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
                # Its lease has ended, or the blocks were refused, so it will not be read.
                load.error = error
                self._port.cancel(request_id)
        lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
        self._ends.append(ReadEnd(request_id, "", load.error, True, 0, b"", 0, lost))

    # The end of a request, in prefill and decode.

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request; publish it if decode will read it.

        Returns:
            Whether vLLM must keep its blocks, and the ``kv_transfer_params`` for the router.
        """
        request_id = request.request_id
        self._rest.did_something()
        self._led(request_id)
        load = self._loads.get(request_id)
        if load is not None and load.failed:
            if request.status is RequestStatus.FINISHED_ERROR:
                # vLLM fails requests whose read has failed. The router may let another engine read the publication.
                self._loads.pop(request_id)
        elif load is not None and load.reading:
            # vLLM itself keeps the blocks until the read has ended.
            load.aborted = True
            self._port.cancel(request_id)
        elif load is not None:
            self._decline(request_id)
        return self._sending.finish(request, block_ids)

    # In each step.

    def step(self, scheduled: Mapping[str, int]) -> StepMetadata:
        """Return the metadata of a step for the workers.

        Args:
            scheduled: how many tokens of each request are computed in this step.
        """
        idle = not scheduled
        if self._take_released() or not idle:
            self._rest.did_something()
        self._take_news()
        self._ask_next()
        reads, publishes, ready = bool(self._loads), self._sending.waiting, bool(self._starts or self._ends)
        holds = self._sending.holding and self._rest.denied
        waits = self._idle.begin(idle=idle, reads=reads, publishes=publishes, ready=ready, holds=holds)
        metadata = StepMetadata(
            self._sending.begin(scheduled),
            warms=self._sources.take(),
            starts=self._starts,
            # After the grants that were attached until now.
            grant_steps=self._port.grant_steps(),
            cancels=self._port.cancels(),
            sent=self._sent,
            waits=waits,
            asks=self._sending.asks,
        )
        sums = self._sending.take_sums()
        if self._setup.sums:
            metadata.sums = sums
        self._starts, self._sent = [], set()
        if not self._all_registered():
            metadata.token = str(self._port.token)
        ends, self._ends = [*self._ends, *self._finished()], []
        for end in ends:
            self._read_ended(end, metadata)
        return metadata

    def take_received(self) -> set[str]:
        """Return the requests whose reads have ended well since the step was begun. Failures wait for the next step,
        because workers have to name the blocks."""
        received = set()
        for end in self._finished():
            if end.error is not None:
                self._ends.append(end)
                continue
            received.add(end.request_id)
            self._read(end)
        return received

    def _finished(self) -> tuple[ReadEnd, ...]:
        """Return the reads that have ended; count those that are disputed, of which the port's log tells."""
        finished = self._port.finished()
        if finished.disputed:
            self._stats.count("disputed", len(finished.disputed))
        return finished.reads

    def told(self, received: Iterable[str]) -> None:
        """Handle that vLLM knows the ends of these reads, and has failed requests that it wanted to fail."""
        for request_id in received:
            load = self._loads.get(request_id)
            if load is not None and load.failed:
                # vLLM has not failed it, so it computes it here, or it was aborted: nobody will read the publication.
                self._give_back(self._loads.pop(request_id))

    def collect(self, news: WorkerNews | None, lost: Iterable[int] = ()) -> None:
        """Take the news of the workers; raises `KvferryError` if a rank cannot be registered.

        Args:
            news: the news; None: there are none.
            lost: blocks that some connector could not load, as vLLM was told.
        """
        # First: what was computed from them is not published.
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
        """Return whether vLLM has to run steps even without a request: workers are being registered, or have to say
        what their devices have computed, or readers are likely to be done soon, see `Rest`."""
        if not self._all_registered() or self._sending.waiting or self._sending.unsummed:
            return True
        if self._sending.holding:
            # While vLLM rests, nothing else looks for them, and it asks before it pauses.
            self._take_released()
        return not self._rest.may_rest(holding=self._sending.holding)

    def take_stats(self) -> KvferryStats | None:
        """Return the counts since the last call; None: nothing was counted."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvferryStats()
        return stats

    def close(self) -> None:
        """Close the port and the client."""
        self._port.close()
        self._client.close()

    # Internal.

    def _take_released(self) -> bool:
        """Free what was released, or note what vLLM may free; return whether there was anything."""
        releases = self._port.released()
        self._sent |= self._sending.released(releases)
        return bool(releases)

    def _all_registered(self) -> bool:
        return len(self._registered) == self._setup.spec.num_ranks

    def _leave_unread(self, request: Any, reference: str) -> None:
        """Handle that an engine is asked to read that does not: it computes the prompt. vLLM may give out blocks of a
        producer to which a step still writes, and its reading agents were not made before graphs were captured."""
        self._stats.count("not_granted")
        if not self._warned:
            self._warned = True
            logger.warning(
                "engine %s is asked to read requests, and its role is prefill, by kv_role or role: it computes them. "
                "Give kv_role kv_consumer and role both to engines that others read from and that read, too",
                self._setup.spec.engine_id,
            )
        self._decline_reference(reference, self._sending.prompt(request))

    def _lead(self, request: Any, load: Load) -> None:
        """Acquire the publication of a request, which others of the same reference then follow, when it is its turn.

        Its prompt is all that it has: it reads before vLLM computes anything of it, and never again, also if it is
        preempted with what it has generated.
        """
        request_id = request.request_id
        load.prompt = self._sending.prompt(request)
        self._loads.lead(request_id, load)
        self._turns.add(request_id, load.reference)
        self._ask_next()

    def _take_news(self) -> None:
        for request_id in self._port.news():
            self._turns.end(request_id)
            if (load := self._loads.get(request_id)) is not None:
                load.waits = False

    def _ask_next(self) -> None:
        """Ask for the requests whose turn it is."""
        for request_id in self._turns.take():
            load = self._loads[request_id]
            load.waits = False
            self._ask(request_id, load)

    def _ask(self, request_id: str, load: Load) -> None:
        try:
            self._port.acquire(
                request_id,
                load.reference,
                progressive=is_routers(load.reference),
                # Of the time since its arrival: it may have followed a request that waited in vain.
                timeout=max(min(LEAST_TIME, self._setup.settings.read_timeout), load.until - self._now()),
                traceparent=load.traceparent,
                prompt=load.prompt,
            )
        except KvferryError as error:
            self._refuse(request_id, error)
        else:
            self._sources.see(load.reference)

    def _led(self, request_id: str, *, found: bool = False) -> None:
        """Let the followers of a request go on.

        Args:
            request_id: the request.
            found: its blocks were read and are in the prefix cache; if not, the first follower reads them.
        """
        reference = self._loads.end_lead(request_id, found=found)
        if reference and found:
            self._has(reference)

    def _has(self, reference: str) -> None:
        """Remember that vLLM has the blocks of a publication in its prefix cache."""
        if self._setup.caches_prefixes:
            self._had.add(reference)

    def _found_here(self, request_id: str, load: Load) -> tuple[int, bool]:
        """Give up a request of which vLLM has all that could be read; return what `matched_tokens` does then."""
        self._decline(request_id)
        if load.error is None and not load.follows:
            self._has(load.reference)
        return 0, False

    def _decline(self, request_id: str) -> None:
        """Give up a request that will not be read."""
        load = self._loads.pop(request_id)
        if load.follows:
            return
        self._led(request_id)
        self._turns.end(request_id)
        # Before the port forgets what it was told of the publication.
        self._give_back(load)
        self._port.cancel(request_id)

    def _give_back(self, load: Load) -> None:
        """Tell the source's home that nobody will read a publication, unless another request here still may, or it is
        of another prompt: its own reader may still come."""
        if not isinstance(load.error, PromptMismatch) and not self._loads.any_of(load.reference):
            load.error = self._decline_reference(load.reference, load.prompt) or load.error

    def _decline_reference(self, reference: str, prompt: Prompt = Prompt.unknown) -> KvferryError | None:
        """Decline a publication; return why it could not be."""
        try:
            self._port.decline(reference, prompt=prompt)
        except KvferryError as error:
            level = logging.WARNING if isinstance(error, PromptMismatch) else logging.INFO
            logger.log(level, "did not decline a publication: %s", error)
            return error
        return None

    def _refuse(self, request_id: str, error: KvferryError) -> None:
        """Handle a request that will not be granted: vLLM is told as soon as it has allocated blocks."""
        self._turns.end(request_id)
        self._loads[request_id].error = error

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
            self._mistaken.add(load.reference)
        self._led(request_id)
        log_failure(end, load.reference, self._setup.spec.engine_id, aborted=load.aborted)
        load.failed = True
        if load.aborted:
            return
        if len(self._setup.spec.groups) == 1 and any(end.lost.values()):
            metadata.lost.update(*end.lost.values())
        else:
            metadata.failed.add(request_id)

    def _read(self, end: ReadEnd) -> None:
        """Forget a request that was read."""
        self._stats.read_ended(end, granted=True)
        # Its followers wait until vLLM has put it into its prefix cache, see `allocated`.
        self._loads.pop(end.request_id)
