"""The connector in vLLM's scheduler process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry._client import Client
from kvferry.engine import Grant, Offer, ReadEnd, SchedulerPort
from kvferry.errors import KvferryError
from kvferry.integrations.vllm.publishing import ComputedPublishing
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews

logger = logging.getLogger(__name__)

REFERENCE = "kvferry_reference"
"""The field of ``kv_transfer_params`` that holds kvferry's reference."""

YIELD = 0.0001
"""Seconds of sleep in an idle step; see `ConnectorScheduler.step`."""

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class _Load:
    """A request that decode wants to read, from its arrival until its read has ended or was given up.

    Attributes:
        reference: reference of the publication to read.
        computed: number of tokens that it has already, according to vLLM's last call.
        reading: it has blocks, and the workers are reading into them.
        aborted: vLLM has aborted it.
        refused: the error with which the read was refused, if the request must fail; vLLM fails a request only after it
            has blocks.
    """

    reference: str
    computed: int = 0
    reading: bool = False
    aborted: bool = False
    refused: KvferryError | None = None


class ConnectorScheduler:
    """Publishes the requests that prefill has finished, and acquires those that decode wants to read.

    A request is in `_sending` from its publication until its blocks are released.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._client = Client(setup.address, allowed_homes=setup.allowed_homes)
        # vLLM frees or reuses the blocks of a failed read as soon as it learns of the failure.
        self._port = SchedulerPort(self._client, setup.spec, hold_until_quiet=True)
        self._publishing = ComputedPublishing(self._port, setup.spec.num_ranks)
        self._loads: dict[str, _Load] = {}
        self._sending: set[str] = set()
        self._registered: set[int] = set()
        self._starts: list[Grant] = []
        self._ends: list[ReadEnd] = []
        self._stats = KvferryStats()

    # The requests of decode.

    def on_new_request(self, request: Any) -> None:
        """Start to acquire the publication of a request that has arrived."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._publishing.expect(request.request_id)
        reference = params.get(REFERENCE)
        if not params.get("do_remote_prefill") or not reference:
            return
        self._loads[request.request_id] = _Load(reference)
        try:
            self._port.acquire(request.request_id, reference, timeout=self._setup.read_timeout)
        except KvferryError as error:
            self._refuse(request.request_id, error)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` will be read, or None if that is not known yet, and whether
        the read is asynchronous."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is None or load.reading:
            return 0, False
        load.computed = computed
        offered = request.num_tokens
        if load.refused is None:
            try:
                offer = self._port.granted(request_id)
            except KvferryError as error:
                self._refuse(request_id, error)
                return self.matched_tokens(request, computed)
            if offer is None:
                return None, False
            offered = min(_tokens(offer), offered)
        if offered <= computed:
            self._decline(request_id)
            return 0, False
        return offered - computed, True

    def allocated(self, request_id: str, block_ids: tuple[list[int], ...], count: int) -> None:
        """Attach the blocks that vLLM has allocated for `count` tokens after the computed ones."""
        load = self._loads.get(request_id)
        if load is None or load.reading:
            return
        if count == 0:
            self._decline(request_id)
            return
        tokens = (load.computed, load.computed + count)
        blocks = self._setup.wanted(block_ids, tokens)
        load.reading = True
        if load.refused is None:
            try:
                self._starts.append(self._port.attach(request_id, blocks, tokens))
                return
            except KvferryError as error:
                # Its lease has ended, or the blocks were refused, so it will not be read.
                load.refused = error
                self._port.cancel(request_id)
        lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
        self._ends.append(ReadEnd(request_id, "", load.refused, True, 0, b"", 0, lost))

    # The end of a request, in prefill and decode.

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request; publish it if decode will read it.

        Returns:
            Whether vLLM must keep its blocks, and the ``kv_transfer_params`` for the router.
        """
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is not None and load.reading:
            # vLLM itself keeps the blocks until the read has ended.
            load.aborted = True
            self._port.cancel(request_id)
        elif load is not None:
            self._decline(request_id)
        params = request.kv_transfer_params or {}
        # The last token was sampled, and its KV cache is not computed yet.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if not params.get("do_remote_decode") or request.status not in _SERVED or tokens <= 0:
            self._publishing.forget(request_id)
            return False, None
        try:
            publication = self._publishing.publish(request_id, self._setup.published(block_ids, tokens))
        except KvferryError as error:
            logger.warning("request %s could not be published: %s", request_id, error)
            return False, None
        self._sending.add(request_id)
        self._stats.count("published")
        return True, {"do_remote_prefill": True, "do_remote_decode": False, REFERENCE: publication.reference}

    # Every step.

    def step(self, scheduled: Iterable[str], *, idle: bool) -> StepMetadata:
        """Return the metadata of a step for the workers.

        Args:
            scheduled: the requests of which tokens are computed in this step.
            idle: nothing is computed in this step.
        """
        if idle and (self._loads or self._publishing.waiting):
            # vLLM runs idle steps in a loop that does not release the interpreter: every other thread would wait for
            # Python's switch interval of 5 ms.
            time.sleep(YIELD)
        sent = {release.request_id for release in self._port.released()} & self._sending
        self._sending -= sent
        metadata = StepMetadata(
            self._publishing.begin(scheduled), starts=self._starts, cancels=self._port.cancels(), sent=sent
        )
        self._starts = []
        if not self._all_registered():
            metadata.token = str(self._port.token)
        ends, self._ends = [*self._ends, *self._port.finished().reads], []
        for end in ends:
            self._read_ended(end, metadata)
        return metadata

    def collect(self, news: WorkerNews | None) -> None:
        """Take the news of the workers; raises `KvferryError` if a rank cannot be registered."""
        if news is None:
            return
        self._registered |= news.registered
        for rank, problem in news.errors.items():
            raise KvferryError(f"rank {rank} cannot register its cache: {problem}")
        for output in news.outputs:
            self._port.collect(output)
        self._publishing.computed(news.computed())

    def has_work(self) -> bool:
        """Return whether vLLM has to run steps even without a request: workers are being registered, or have to say
        what their devices have computed."""
        return not self._all_registered() or self._publishing.waiting

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

    def _all_registered(self) -> bool:
        return len(self._registered) == self._setup.spec.num_ranks

    def _decline(self, request_id: str) -> None:
        """Give up a request that will not be read."""
        load = self._loads.pop(request_id)
        self._port.cancel(request_id)
        self._give_back(load)

    def _give_back(self, load: _Load) -> None:
        """Tell the source's home that nobody will read a publication."""
        try:
            self._port.decline(load.reference)
        except KvferryError as error:
            logger.info("could not decline a publication: %s", error)

    def _refuse(self, request_id: str, error: KvferryError) -> None:
        """Handle a request that will not be granted: vLLM computes it, or fails it like a request whose read failed."""
        logger.warning("request %s will not be read: %s: %s", request_id, type(error).__name__, error)
        self._stats.count("not_granted")
        if self._setup.fail_requests:
            self._loads[request_id].refused = error
        else:
            self._give_back(self._loads.pop(request_id))

    def _read_ended(self, end: ReadEnd, metadata: StepMetadata) -> None:
        request_id = end.request_id
        load = self._loads.pop(request_id)
        metadata.received.add(request_id)
        if end.error is None:
            self._stats.count("read", end.bytes)
            return
        self._stats.count("failed")
        logger.warning("the read of request %s failed: %s: %s", request_id, type(end.error).__name__, end.error)
        if load.aborted or not self._setup.fail_requests:
            # Otherwise the request fails, and the router may let another engine read it.
            self._give_back(load)
        if load.aborted:
            return
        if len(self._setup.spec.groups) == 1:
            metadata.lost.update(*end.lost.values())
        else:
            metadata.failed.add(request_id)


def _tokens(offer: Offer) -> int:
    """Return how many tokens an offer has in all groups."""
    ends = [blocks.end_token for blocks in offer.blocks().values() if blocks.end_token is not None]
    return min(ends, default=0)
