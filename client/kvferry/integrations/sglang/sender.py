"""The backend's sender: one for each request, on each rank of prefill."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from kvferry import Prompt, Publication, Release, ReleaseOutcome
from kvferry.errors import KvferryError
from kvferry.integrations.sglang.bootstrap import request_name, room_reference
from kvferry.integrations.sglang.manager import KvferryManager, Pages, RequestFailed

logger = logging.getLogger(__name__)


class KvferrySender(BaseKVSender):  # type: ignore[misc]
    """Publishes a request when its whole prompt is computed, and succeeds when the publication is released.

    Not chunk by chunk: SGLang frees the pages of a request that is aborted between two chunks without asking
    (`process_pending_chunked_abort`; 0.5.23), and published pages may not be freed before the release (R2).

    Rank 0 decides for all ranks, since SGLang takes the least of their answers. Other ranks never answer "failed",
    which would end the request while rank 0 still waits for the release.
    """

    def __init__(
        self,
        mgr: KvferryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._pages: list[Pages] = []
        self._states: Sequence[Any] = ()
        self._tokens = 0
        self._wanted = -1
        self._row = -1
        self._name = ""
        self._prompt = Prompt.unknown
        self._load = 0
        self._sent = False
        self._publication: Publication | None = None
        self._release: Release | None = None
        self._failure = mgr.claim(bootstrap_room, self) if mgr.leader else ""
        claimed = mgr.leader and not self._failure
        self._reference = room_reference(mgr.own_source, bootstrap_room) if claimed else ""

    def expect_prompt(self, rid: str, prompt: Prompt, load: int = 0) -> None:
        """Take SGLang's request id, the prompt, and the number of its load (0: none): see `hooks` and `loads`."""
        self._name = request_name(self.bootstrap_room, rid)
        self._prompt = prompt
        self._load = load

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Take the number of pages to come, and the request's row of the auxiliary buffers."""
        self._wanted = num_kv_indices
        self._row = -1 if aux_index is None else aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Return whether SGLang shall call `send`."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Pages, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Take the pages of a chunk; the last chunk publishes the request."""
        self._pages.append(np.asarray(kv_indices))
        self._tokens += num_kv_tokens or 0
        if state_indices is not None:
            self._states = state_indices
        if sum(map(len, self._pages)) < self._wanted or self._sent:
            return
        self._sent = True
        if not self.kv_mgr.leader or self._failure:
            return
        try:
            payload = self.kv_mgr.aux.payload(self._row, self._tokens)
            blocks = self.kv_mgr.blocks(np.concatenate(self._pages), self._states, 0, self._tokens)
            self._publication = self.kv_mgr.publish(self._reference, self._name, blocks, payload, self._prompt)
        except KvferryError as error:
            self._failure = f"{type(error).__name__}: {error}"

    def poll(self) -> Any:
        if self._load and not self._failure and self.kv_mgr.loads.waits(self._load):
            # The request stays in SGLang's bootstrap queue.
            return KVPoll.Bootstrapping
        if not self.kv_mgr.leader:
            return KVPoll.Success if self._sent else KVPoll.WaitingForInput
        if self._publication is None:
            return KVPoll.Failed if self._failure else KVPoll.WaitingForInput
        if self._release is None:
            self._release = self.kv_mgr.take_release(self._publication)
        if self._release is None:
            return KVPoll.Transferring
        if self._release.outcome is not ReleaseOutcome.READ or any(
            read.state != "valid" for read in self._release.reads
        ):
            self._failure = self._failure or str(self._release)
        return KVPoll.Failed if self._failure else KVPoll.Success

    def abort(self) -> None:
        """Withdraw the request. Published pages stay until the release."""
        if not self.kv_mgr.leader or self._release is not None:
            return
        self._failure = self._failure or "aborted"
        if self._publication is not None:
            self.kv_mgr.port.abort(self._publication)
            return
        if self._reference:
            # Decode may already wait for the publication.
            self.kv_mgr.decline(self._reference)
        self.clear()

    def clear(self) -> None:
        self.kv_mgr.unclaim(self.bootstrap_room, self)

    def failure_exception(self) -> NoReturn:
        self.clear()
        raise RequestFailed(self._failure)

    def get_transfer_metric(self) -> Any:
        """Return the bytes that decode has read."""
        read = sum(read.bytes for read in self._release.reads) if self._release is not None else None
        return KVTransferMetric(transfer_total_bytes=read)
