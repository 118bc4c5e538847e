"""The backend's sender and receiver: one for each request, on each rank of prefill and of decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender, KVPoll, KVTransferMetric

from kvferry import Prompt, Publication, Read, ReadState, Release, ReleaseOutcome
from kvferry.errors import KvferryError, PromptMismatch
from kvferry.integrations.sglang.aux_rows import BadPayload
from kvferry.integrations.sglang.bootstrap import given_reference, request_name, room_reference
from kvferry.integrations.sglang.manager import REPEATED, KvferryManager, Pages, RequestFailed

FIND_TIMEOUT = 60.0
"""Seconds in which a request's prefill instance must be found."""


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
        """Take SGLang's request id, the prompt, and the number of its load (0: none): see `tell_sender`."""
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


class KvferryReceiver(BaseKVReceiver):  # type: ignore[misc]
    """Reads this rank's share of a request when SGLang has allocated pages.

    The pages of a failed read may still be written to. SGLang then keeps the pages until every rank reports its share
    quiet, by `KvferryManager.is_abort_release_safe`.

    Attributes:
        abort_notified: whether a read was started whose pages must be quiet before they are used again; SGLang's name.
        bootstrap_infos, require_staging, conclude_state: SGLang reads these; without meaning here.
    """

    bootstrap_infos: tuple[object, ...] = ()
    require_staging = False
    conclude_state: Any = None

    def __init__(self, mgr: KvferryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room or 0
        self.abort_notified = False
        self._address = bootstrap_addr
        self._reference = given_reference(bootstrap_addr)
        self._given = bool(self._reference)
        self._since = time.monotonic()
        self._asked = False
        self._row = -1
        self._prompt_tokens: int | None = None
        self._name = ""
        self._prompt = Prompt.unknown
        self._read: Read | None = None
        self._good = False
        self._failure = ""
        self._is_anothers = False
        problem = mgr.claim(self.bootstrap_room, self)
        if problem:
            self.fail(problem)

    def expect_prompt(self, rid: str, tokens: int, prompt: Prompt) -> None:
        """Take SGLang's request id, the number of tokens of the prompt, and the prompt: see `tell_receiver`."""
        self._name = request_name(self.bootstrap_room, rid)
        self._prompt_tokens = tokens
        self._prompt = prompt

    def init(self, prefill_dp_rank: int) -> None:
        """Look for the prefill instance."""
        self._asked = True

    def send_metadata(
        self,
        kv_indices: Pages,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        """Start to read into the pages behind decode's prefix, of whole pages, and into the pages of a sliding window,
        by SGLang's list of states. `aux_index` is the request's row of the auxiliary buffers."""
        self._row = -1 if aux_index is None else aux_index
        if self._failure:
            return
        first, end = decode_prefix_len or 0, self._prompt_tokens
        if end is None:
            self.fail("this version of SGLang does not say how many tokens the prompt has")
            return
        # Read while prefill computes. SGLang's prefill publishes all at once, and every prefill windows at the end.
        early = self._given and first < end and not self.kv_mgr.pools.window
        tokens = (first, end) if early else None
        try:
            blocks = self.kv_mgr.blocks(kv_indices, state_indices or (), first)
            self._read = self.kv_mgr.read(
                self._reference, self.bootstrap_room, self._name, blocks, tokens, self._prompt
            )
        except KvferryError as error:
            self.fail(error)

    def poll(self) -> Any:
        """Return the state of the request on this rank, and take the payload beside the KV cache when it is read."""
        if self._failure:
            return KVPoll.Failed
        if self._good:
            return KVPoll.Success
        if self._read is None:
            return self._find()
        if not self._read.done():
            self.kv_mgr.breathe()
            return KVPoll.Transferring
        error = self._read.exception(0)
        if error is not None:
            self.kv_mgr.sources.forget(self._address)
            return self.fail(error)
        result = self._read.result(0)
        try:
            tokens = self.kv_mgr.aux.write(self._row, result.payload, self.bootstrap_room)
        except BadPayload as refused:
            return self.fail(refused)
        if tokens != self._prompt_tokens:
            return self.fail(f"prefill has computed a prompt of {tokens} tokens, and decode has {self._prompt_tokens}")
        self._good = True
        self.kv_mgr.counts.read_done(result)
        return KVPoll.Success

    def _find(self) -> Any:
        """Find the prefill instance, unless the request carries a reference."""
        if not self._asked:
            return KVPoll.Bootstrapping
        if not self._reference:
            source, problem = self.kv_mgr.sources.get(self._address)
            if source is None:
                if time.monotonic() - self._since > FIND_TIMEOUT:
                    return self.fail(f"no prefill instance at {self._address}: {problem or 'no answer'}")
                return KVPoll.Bootstrapping
            try:
                self._reference = room_reference(source, self.bootstrap_room)
            except KvferryError as error:
                return self.fail(error)
        return KVPoll.WaitingForInput

    def fail(self, reason: str | Exception) -> Any:
        """Fail the request, and count the failure by the class of the error, if there is one."""
        if not self._failure:
            name = type(reason).__name__ if isinstance(reason, Exception) else RequestFailed.__name__
            self._failure = f"{name}: {reason}" if isinstance(reason, Exception) else reason
            self._is_anothers = isinstance(reason, PromptMismatch)
            self.kv_mgr.counts.read_failed(name)
        return KVPoll.Failed

    def abort(self) -> None:
        """Abort the request, unless its read is done."""
        if self._good:
            return
        if not self._failure:
            self._failure = "aborted"
            self.kv_mgr.counts.add("reads.outcomes", "cancelled")
        self._give_up(aborted=True)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Stop reading. SGLang calls this on every rank when one rank has failed."""
        self._give_up()

    def _give_up(self, *, aborted: bool = False) -> None:
        """Stop reading, and decline the publication: a room has one reader and one try.

        A reference that the request carried may have another reader after a failed read. A repetition must not decline
        the first request's publication, nor may a request decline that of another prompt, whose reader may still come.
        """
        tried = aborted or not self._given or self._read is None
        if self._reference and tried and self._failure != REPEATED and not self._may_be_anothers():
            self.kv_mgr.decline(self._reference, self._prompt)
        if self._read is not None:
            self._read.cancel()
            self.abort_notified = True

    def _may_be_anothers(self) -> bool:
        """Return whether the publication may be of another prompt, as far as this rank knows: if another rank has
        failed before this rank received the publication's marks, that may be the reason."""
        if self._is_anothers or self._read is None:
            return self._is_anothers
        state = self._read.state
        if state is ReadState.FAILED:
            # The read has failed after SGLang's last poll.
            return isinstance(self._read.exception(0), PromptMismatch)
        return state is ReadState.WAITING and not self._failure

    def clear(self) -> None:
        """Forget the request: SGLang has freed its pages, or uses them."""
        if self._read is not None:
            self.kv_mgr.clear_deferred_abort_state(self.bootstrap_room)
        self.kv_mgr.unclaim(self.bootstrap_room, self)

    def failure_exception(self) -> NoReturn:
        raise RequestFailed(self._failure)
