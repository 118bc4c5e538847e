"""The connector in vLLM's scheduler process."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry._client import Client
from kvferry.engine import Grant, Offer, ReadEnd, SchedulerPort
from kvferry.errors import KvferryError
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews

logger = logging.getLogger(__name__)

REFERENCE = "kvferry_reference"
"""The one field of ``kv_transfer_params`` that is ours."""

YIELD = 0.0001
"""Seconds."""

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class _Load:
    """A request of decode, from its arrival until its read has ended, or it is known that there will be none.

    Attributes:
        reference: to what it shall read.
        computed: tokens that it has already, as vLLM last said.
        reading: it has blocks, and the workers read into them.
        aborted: vLLM wants it no more.
        refused: it will not be granted, and shall fail: that takes blocks.
    """

    reference: str
    computed: int = 0
    reading: bool = False
    aborted: bool = False
    refused: KvferryError | None = None


class ConnectorScheduler:
    """Publishes what prefill has finished, and acquires what decode is asked to read.

    A request is in `_sending` from its publication until its blocks are free.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._client = Client(setup.address, allowed_homes=setup.allowed_homes)
        # vLLM frees or computes into a failed read's blocks as soon as it hears of it.
        self._port = SchedulerPort(self._client, setup.spec, hold_until_quiet=True)
        self._loads: dict[str, _Load] = {}
        self._sending: set[str] = set()
        self._registered: set[int] = set()
        self._starts: list[Grant] = []
        self._ends: list[ReadEnd] = []
        self._stats = KvferryStats()

    # A request's way through decode.

    def on_new_request(self, request: Any) -> None:
        """It has arrived: begin to wait for its blocks and to pin them."""
        params = request.kv_transfer_params or {}
        reference = params.get(REFERENCE)
        if not params.get("do_remote_prefill") or not reference:
            return
        self._loads[request.request_id] = _Load(reference)
        try:
            self._port.acquire(request.request_id, reference, timeout=self._setup.read_timeout)
        except KvferryError as error:
            self._refuse(request.request_id, error)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` will be read; None: not known yet."""
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
        """It has blocks, for `count` tokens after those that it has already."""
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
                # Its lease has ended since it was asked for, or the blocks are refused: nobody will read it then.
                load.refused = error
                self._port.cancel(request_id)
        lost = {name: tuple(listed.ids.tolist()) for name, listed in blocks.items()}
        self._ends.append(ReadEnd(request_id, "", load.refused, True, 0, b"", 0, lost))

    # A request's end, on either side.

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """It has ended. Whether its blocks stay, and what the router is told."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is not None and load.reading:
            # vLLM itself keeps the blocks until the read has ended.
            load.aborted = True
            self._port.cancel(request_id)
        elif load is not None:
            self._decline(request_id)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status not in _SERVED:
            return False, None
        # The last token was sampled; nothing has been computed of it.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if tokens <= 0:
            return False, None
        try:
            publication = self._port.publish(request_id, self._setup.published(block_ids, tokens))
        except KvferryError as error:
            logger.warning("request %s is not offered: %s", request_id, error)
            return False, None
        self._sending.add(request_id)
        self._stats.count("published")
        return True, {"do_remote_prefill": True, "do_remote_decode": False, REFERENCE: publication.reference}

    # Each step.

    def step(self, *, idle: bool) -> StepMetadata:
        """What the workers have to hear. `idle`: nothing is computed in this step."""
        if idle and self._loads:
            # vLLM asks again at once, and keeps the interpreter to itself meanwhile: each thread that has something to
            # say would wait for Python's switch interval of 5 ms.
            time.sleep(YIELD)
        sent = {release.request_id for release in self._port.released()} & self._sending
        self._sending -= sent
        metadata = StepMetadata(starts=self._starts, cancels=self._port.cancels(), sent=sent)
        self._starts = []
        if not self._all_registered():
            metadata.token = str(self._port.token)
        ends, self._ends = [*self._ends, *self._port.finished().reads], []
        for end in ends:
            self._read_ended(end, metadata)
        return metadata

    def collect(self, news: WorkerNews | None) -> None:
        """What the workers say; raises `KvferryError` if one of them will never be able to serve."""
        if news is None:
            return
        self._registered |= news.registered
        for rank, problem in news.errors.items():
            raise KvferryError(f"rank {rank} cannot register its cache: {problem}")
        for output in news.outputs:
            self._port.collect(output)

    def has_work(self) -> bool:
        """Whether vLLM has to step although it has no request: workers are being registered."""
        return not self._all_registered()

    def take_stats(self) -> KvferryStats | None:
        """Counts since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvferryStats()
        return stats

    def close(self) -> None:
        """End the session."""
        self._port.close()
        self._client.close()

    # Within.

    def _all_registered(self) -> bool:
        return len(self._registered) == self._setup.spec.num_ranks

    def _decline(self, request_id: str) -> None:
        """Nobody will read it."""
        load = self._loads.pop(request_id)
        self._port.cancel(request_id)
        self._give_back(load)

    def _give_back(self, load: _Load) -> None:
        """Its source need not wait for a reader."""
        try:
            self._port.decline(load.reference)
        except KvferryError as error:
            logger.info("not declined: %s", error)

    def _refuse(self, request_id: str, error: KvferryError) -> None:
        """It will not be granted: vLLM computes it itself, or fails it, which it does to loads that failed."""
        logger.warning("request %s is not read: %s: %s", request_id, type(error).__name__, error)
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
        logger.warning("request %s was not read: %s: %s", request_id, type(end.error).__name__, end.error)
        if load.aborted or not self._setup.fail_requests:
            # Where the request fails, the router may have another engine read it.
            self._give_back(load)
        if load.aborted:
            return
        if len(self._setup.spec.groups) == 1:
            metadata.lost.update(*end.lost.values())
        else:
            metadata.failed.add(request_id)


def _tokens(offer: Offer) -> int:
    """How many tokens are offered."""
    ends = [blocks.end_token for blocks in offer.blocks().values() if blocks.end_token is not None]
    return min(ends, default=0)
