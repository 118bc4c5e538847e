"""Holds the leases of an engine's reads: acquires them, reports the ends of reads to homes, and ends leases (PROTOCOL,
Leases 4)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from kvferry._control.acquire_request import Acquired, AcquireRequest, ReadTerms
from kvferry._control.acquisition import ASKED_AT_ONCE, HOME_PATIENCE, Acquisition
from kvferry._control.asking import AskingAcquisition
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.granted_steps import GrantedSteps
from kvferry._control.homes import Homes
from kvferry._control.notifier import Message, Notifier, read_done
from kvferry._control.questions import AskedPrefix
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import PromptCheck, ReaderPrompt
from kvferry._directory.directory import Listing
from kvferry._loop import Loop
from kvferry._prompt import Prompt
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.authority import READ_ID_BYTES, read_id_of
from kvferry._wire.publication import granted_by
from kvferry._wire.reference import (
    MAX_HINT_BLOCKS,
    format_reference,
    hint_digest,
    parse_engine_reference,
    parse_reference,
    question_reference,
)
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import InvalidField, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

VERDICT_TIMEOUT = 1.0
"""Seconds for the home's verdict; without a verdict the reader's own deadline decides (PROTOCOL, Endings)."""

DECLINE_PATIENCE = 120.0
"""Seconds for which a decline is repeated: after that, a publication without readers is released by time."""

REPORTS_KEPT = 65_536
"""Leases of which a rank remembers that it has reported on them: more than it shares while one read lasts."""


class LeaseHolder:
    """Holds the leases of one destination engine. Belongs to the client's event loop; `request` and `check` may be
    called on any thread, and make no RPC.

    Args:
        rank: the only rank of this holder, if each rank has its own; None: all ranks.
        prompt_check: how the marks of publications are checked.
        optimistic: whether reads take their blocks from hints.
    """

    def __init__(
        self,
        loop: Loop,
        homes: Homes,
        renewals: Renewals,
        token: EngineToken,
        rank: int | None = None,
        prompt_check: PromptCheck = PromptCheck.COMPARE,
        *,
        optimistic: bool = True,
    ) -> None:
        self._optimistic = optimistic
        self._prompt_check = prompt_check
        self._loop = loop
        self._homes = homes
        self._rank = rank
        self._renewals = renewals
        self._reader = engine_ref(token)
        self._secret = token.session_secret
        self._notifier = Notifier(loop, self._reader)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()
        """By home and engine, as long as an acquisition has one."""
        self._unseen: set[asyncio.Task[None]] = set()
        """Tasks that end the leases which may be granted to cancelled reads."""
        self._reported: dict[bytes, None] = {}
        """The leases, shared with other ranks, on which this rank has reported."""

    def request(
        self,
        reference: str | AskedPrefix,
        terms: ReadTerms,
        *,
        read_id: str = "",
        request_id: str = "",
        parties: int = 1,
    ) -> AcquireRequest:
        """Make the request for a read of a publication, or of what an engine is asked for. `request_id` is the reader's
        name for the request; without a `read_id` the read gets a random one.

        Raises:
            BadReference: the string is not a reference, or not that of the engine that is asked.
            HomeNotAllowed, EngineNotListed, DirectoryUnavailable: see `Homes.of`.
        """
        read_id = read_id or secrets.token_hex(8)
        asked, check = None, self._prompt_check
        if isinstance(reference, AskedPrefix):
            asked, reference = reference, self._made_for(reference)
            # An answer without marks is none: the source was told the prompt.
            check = PromptCheck.REQUIRE if check is PromptCheck.COMPARE else check
        parsed = parse_reference(reference)
        # A reference may lack the address, which later steps need, such as the grant to a rank on another node.
        parsed.home = self._homes.address_of(parsed)
        home = self._homes.get(parsed.home)
        given, hint = "", parsed.hint
        if hint:
            parsed.ClearField("hint")
            given, reference = reference, format_reference(parsed)
        # Ranks without a scheduler would each have to validate the whole read.
        usable = self._optimistic and not terms.expected_reads and (self._rank is None or parties == 1)
        return AcquireRequest(
            home=home,
            reference=parsed,
            text=reference,
            given=given,
            hint=hint if usable else b"",
            read_id=read_id,
            parties=parties,
            expected_reads=terms.expected_reads,
            deadline=self._loop.now() + terms.timeout,
            prompt=ReaderPrompt(terms.prompt, check, request_id or read_id, self._reader.engine_id),
            span=Span(terms.traceparent),
            progressive=terms.progressive,
            asked=asked,
        )

    def _made_for(self, asked: AskedPrefix) -> str:
        """Make the reference under which an engine is asked, and under which its answer is read."""
        if isinstance(asked.engine, Listing):
            return question_reference(asked.engine.home, asked.engine.engine_id)
        engine = parse_engine_reference(asked.engine)
        return question_reference(self._homes.address_of(engine), engine.engine_id)

    def check(self, reference: str, prompt: Prompt) -> None:
        """Raise `BadReference` or `HomeNotAllowed` for a reference that cannot be read, and `PromptMismatch` if the
        reference itself has a mark of another prompt."""
        parsed = parse_reference(reference)
        self._homes.of(parsed)
        ReaderPrompt(prompt, self._prompt_check, engine_id=self._reader.engine_id).refuse(parsed)

    def hinted(self, request: AcquireRequest) -> Acquired | None:
        """Take the blocks of a read from the hint in its reference; None: it has none that can be used, so that a lease
        is needed. May be called on any thread. Nothing proves the hint, which went through routers, before the home
        validates the read. Raises as `ReaderPrompt.judge` by the marks in the reference."""
        if not request.hint:
            return None
        steps, reference = GrantedSteps(), request.reference
        try:
            hint = pb.Hint.FromString(request.hint)
            count = sum(sum(group.run_counts) for group in hint.groups)
            if count > MAX_HINT_BLOCKS:
                raise InvalidField("number of blocks of a hint", count, f"at most {MAX_HINT_BLOCKS}")
            blocks, complete = granted_by(hint)
            steps.add([blocks], complete)
            part = steps.take()
        except (DecodeError, KvferryError):
            # The home has the right ones.
            request.hint = b""
            return None
        request.prompt.refuse(reference)
        request.prompt.told(steps.marks, reference, hint.request_id, complete=True)
        source = pb.EngineRef(engine_id=reference.engine_id, incarnation=reference.incarnation)
        return Acquired(ReaderLease.without_end(), source, hint.request_id, part, self._loop.now())

    def acquire(self, request: AcquireRequest, changed: Callable[[], object]) -> Acquisition:
        """Begin to acquire a publication: await `Acquisition.first`. For `changed` see `ReaderLease.changed`."""
        # Ranks that share a read find it by its name. One rank's read has an id of its own: another read of the same
        # name must not get its lease, which ends with the first of the two.
        shared = request.parties > 1
        read_id = read_id_of(self._secret, request.read_id) if shared else secrets.token_bytes(READ_ID_BYTES)
        asked = pb.ReadBlocksRequest(
            reference=request.text,
            reader=self._reader,
            read_id=read_id,
            parties=request.parties,
            expected_reads=request.expected_reads,
        )
        source = (request.home.address, request.reference.engine_id)
        turns = self._turns.setdefault(source, asyncio.Semaphore(ASKED_AT_ONCE))
        given = (self._loop, request, asked, self._renewals, self.let_go, self._aside, turns, changed)
        if request.asked is not None:
            return AskingAcquisition(request.asked, partial(self.withdraw, request), *given)
        return Acquisition(*given)

    def withdraw(self, request: AcquireRequest) -> None:
        """Tell the home that nobody will read the answer to a question: its source then has the blocks back at once."""
        self.decline(request.text, HOME_PATIENCE)

    def drop(self, lease: ReaderLease) -> None:
        self._renewals.drop(lease)

    def let_go(
        self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType = pb.RANK_OUTCOME_CANCELLED
    ) -> None:
        """Stop the renewals of a lease that is not needed, and end it at its home; a home that cannot be reached ends
        it by time (PROTOCOL, Leases 7). A lease that other ranks share ends for this rank only."""
        self.drop(lease)
        self._remember(lease)
        ends = [pb.Notification(cancel=pb.CancelRead(lease_id=lease.lease_id))]
        if self._rank is not None:
            ends = read_done(lease.lease_id, [pb.RankReport(rank=self._rank, outcome=outcome)])
        self._notifier.send(home, [Message(end, lease.deadline) for end in ends])

    def reports_first(self, request: AcquireRequest, lease: ReaderLease) -> bool:
        """Record that a read of this process is about to be reported. False: this rank has reported on the lease
        before, for another read of the same name. The lease may have ended with the other ranks' reports, and the home
        would answer as it did to the first report."""
        first = lease.lease_id not in self._reported
        if request.parties > 1:
            self._remember(lease)
        return first

    def _remember(self, lease: ReaderLease) -> None:
        if self._rank is not None:
            self._reported[lease.lease_id] = None
            if len(self._reported) > REPORTS_KEPT:
                del self._reported[next(iter(self._reported))]

    def report(
        self,
        request: AcquireRequest,
        lease: ReaderLease,
        shares: Sequence[pb.RankReport],
        answered: Callable[[NotificationAnswer | None], None],
        span: Span = NO_SPAN,
    ) -> None:
        """Report the ends of all shares of a read to its home: repeated, if need be, until its lease ends, or, of a
        read from a hint, until `validated_by`. For `answered` see `Message`."""
        if lease.lease_id:
            ends, until = read_done(lease.lease_id, shares), lease.deadline
        else:
            validate = pb.Validate(
                reference=request.text,
                # Of this read alone. An earlier read with the same name may have been answered VALID before the release
                # of the blocks, and a lease that was granted too late is given back: neither must decide about this
                # one.
                read_id=secrets.token_bytes(READ_ID_BYTES),
                hint_digest=hint_digest(request.hint),
                parties=request.parties,
                reports=shares,
            )
            ends, until = [pb.Notification(validate=validate)], self.validated_by(request)
        self._notifier.send(request.home, [Message(end, until, answered, VERDICT_TIMEOUT, span) for end in ends])

    def validated_by(self, request: AcquireRequest) -> float:
        """Until when, from now, the home is asked to validate a read from a hint, on the loop's clock."""
        return min(request.deadline, self._loop.now() + HOME_PATIENCE)

    def decline(self, reference: str, patience: float = DECLINE_PATIENCE) -> None:
        """Tell the home that this engine will not read a publication (PROTOCOL, Leases 8): for `patience` seconds again
        if the home cannot be reached, or is recovering. Raises as `request`."""
        home = self._homes.of(parse_reference(reference))
        decline = pb.Notification(decline=pb.Decline(reference=reference))
        self._notifier.send(home, [Message(decline, self._loop.now() + patience)])

    async def close(self, timeout: float) -> None:
        """Stop repeating messages, and wait at most `timeout` seconds for leases of cancelled reads that may still be
        granted, and for the messages that were sent. Idempotent."""
        until = self._loop.now() + timeout
        if self._unseen:
            await asyncio.wait(self._unseen, timeout=timeout)
        await self._notifier.close(max(0.0, until - self._loop.now()))

    def _aside(self, ending: Coroutine[Any, Any, None]) -> None:
        task = self._loop.spawn(ending, "the end of a lease")
        self._unseen.add(task)
        task.add_done_callback(self._unseen.discard)
