"""The backend's receiver: one for each request, on each rank of decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll

from kvferry import Prompt, Read, ReadState
from kvferry.errors import KvferryError, PromptMismatch
from kvferry.integrations.sglang.aux_rows import BadPayload
from kvferry.integrations.sglang.bootstrap import given_reference, request_name, room_reference
from kvferry.integrations.sglang.manager import REPEATED, KvferryManager, Pages, RequestFailed

FIND_TIMEOUT = 60.0
"""Seconds in which a request's prefill instance must be found."""


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
        self._first = 0
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
        """Take SGLang's request id, the number of tokens of the prompt, and the prompt: see `hooks`."""
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
        self._first = decode_prefix_len or 0
        if self._failure:
            return
        if self._prompt_tokens is None:
            self.fail("this version of SGLang does not say how many tokens the prompt has")
            return
        try:
            blocks = self.kv_mgr.blocks(kv_indices, state_indices or (), self._first)
            self._read = self.kv_mgr.read(
                self._reference, self.bootstrap_room, self._name, blocks, self._tokens(), self._prompt
            )
        except KvferryError as error:
            self.fail(error)

    def poll(self) -> Any:
        """Return the state of the request on this rank."""
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
        return self._take(self._read)

    def fail(self, reason: str | Exception) -> Any:
        """Fail the request, and count the failure by the class of the error, if there is one."""
        if not self._failure:
            name = type(reason).__name__ if isinstance(reason, Exception) else RequestFailed.__name__
            self._failure = f"{name}: {reason}" if isinstance(reason, Exception) else reason
            self._is_anothers = isinstance(reason, PromptMismatch)
            self.kv_mgr.counts.add("reads.outcomes", "failed")
            self.kv_mgr.counts.add("reads.failures", name)
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

    def _take(self, read: Read) -> Any:
        """Hand over the payload that came beside the KV cache."""
        result = read.result(0)
        try:
            tokens = self.kv_mgr.aux.write(self._row, result.payload, self.bootstrap_room)
        except BadPayload as error:
            return self.fail(error)
        if tokens != self._prompt_tokens:
            return self.fail(f"prefill has computed a prompt of {tokens} tokens, and decode has {self._prompt_tokens}")
        self._good = True
        self.kv_mgr.counts.add("reads.outcomes", "done")
        self.kv_mgr.counts.add("reads.prompts", result.prompt)
        self.kv_mgr.counts.add("ranks.bytes", by=result.bytes)
        return KVPoll.Success

    def _tokens(self) -> tuple[int, int] | None:
        """Return the tokens to read while prefill still computes; None: all, when the publication is complete. SGLang's
        prefill publishes all at once, and every prefill publishes windows at the end."""
        if not self._given or self._prompt_tokens is None or self.kv_mgr.pools.window:
            return None
        if self._first >= self._prompt_tokens:
            return None
        return self._first, self._prompt_tokens
