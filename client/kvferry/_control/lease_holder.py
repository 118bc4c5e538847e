"""Holds the leases of an engine's reads: acquires them, reports the ends of reads to homes, and ends leases (PROTOCOL,
Leases 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry._clock import LONGEST, now
from kvferry._control.acquirer import Acquirer
from kvferry._control.acquisition import Acquired, AcquireRequest, Told
from kvferry._control.batches import read_done
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.homes import Homes
from kvferry._control.judgement import Confirm
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import PromptCheck, ReaderPrompt
from kvferry._control.teller import Message, Teller
from kvferry._forks import OneProcess
from kvferry._prompt import Prompt
from kvferry._tracing import Span
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT = 1.0
"""Seconds for the home's verdict; without one the reader's own deadline decides (PROTOCOL, Endings)."""

DECLINE_PATIENCE = 120.0
"""Seconds for which a decline is repeated: after that, a publication that nobody reads is released by time."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadReport:
    """Reports the ends of all shares of a read.

    Attributes:
        lease: the lease of the read.
        shares: the ends of the shares.
        answered: called with the home's verdict, and with None for each attempt without one. Called on any thread; must
            not block.
    """

    lease: ReaderLease
    shares: Sequence[pb.RankReport]
    answered: Callable[[pb.Verdict.ValueType | None], None]


class LeaseHolder(OneProcess):
    """Holds the leases of one destination engine.

    Threading: only `close` waits. The other methods may start an RPC, and return at once.

    Args:
        homes: connections to node servers.
        renewals: renews the leases.
        token: token of the engine.
        rank: the rank that it acts for, if each rank has a holder of its own; None: all ranks.
        confirm: whether the engine is told of a read before or after its home has confirmed the lease.
        prompt_check: what to do with the marks of publications.
    """

    def __init__(
        self,
        homes: Homes,
        renewals: Renewals,
        token: EngineToken,
        rank: int | None = None,
        confirm: Confirm = Confirm.BEFORE,
        prompt_check: PromptCheck = PromptCheck.COMPARE,
    ) -> None:
        self.confirm = confirm
        self._prompt_check = prompt_check
        self._homes = homes
        self._rank = rank
        self._renewals = renewals
        self._reader = engine_ref(token)
        self._teller = Teller(self._reader)
        self._acquirer = Acquirer(token, renewals, self._give_up)

    def request(
        self,
        reference: str,
        read_id: str,
        *,
        parties: int,
        expected_reads: int,
        timeout: float,
        prompt: Prompt = Prompt.unknown,
        request_id: str = "",
        traceparent: str = "",
        progressive: bool = False,
    ) -> AcquireRequest:
        """Make the request for a read of a publication, part of the trace that `traceparent` names. Makes no RPC.

        `request_id` is the reader's name for the request.

        Raises:
            BadReference: the string is not a reference.
            HomeNotAllowed: this client may not connect to the home in the reference.
            EngineNotListed, DirectoryUnavailable: the reference names no home, and the directory does not know it.
            InvalidField: an argument is out of range.
        """
        if not 0 < timeout < LONGEST:
            raise InvalidField("timeout", timeout, f"more than 0 seconds, and less than {LONGEST:g}")
        parsed = parse_reference(reference)
        # What follows, such as the grant to a rank on another node, needs the address; a reference may lack it.
        parsed.home = self._homes.address_of(parsed)
        home = self._homes.get(parsed.home)
        return AcquireRequest(
            home=home,
            reference=parsed,
            text=reference,
            read_id=read_id,
            parties=parties,
            expected_reads=expected_reads,
            deadline=now() + timeout,
            prompt=ReaderPrompt(prompt, self._prompt_check, request_id, self._reader.engine_id),
            span=Span(traceparent),
            progressive=progressive,
        )

    def check(self, reference: str, prompt: Prompt) -> None:
        """Raise `BadReference` or `HomeNotAllowed` for a reference that cannot be read, and `PromptMismatch` for one of
        another prompt, as far as it says. Makes no RPC."""
        parsed = parse_reference(reference)
        self._homes.of(parsed)
        ReaderPrompt(prompt, self._prompt_check, engine_id=self._reader.engine_id).refuse(parsed)

    def acquire(
        self,
        request: AcquireRequest,
        cancellation: Cancellation,
        renewed: Callable[[float], None],
        told: Callable[[Told], None],
    ) -> None:
        """Start to acquire a publication. Returns at once.

        Args:
            request: the publication to read.
            cancellation: interrupts the wait.
            renewed: called with the new deadline of the lease after each acknowledged renewal, until `drop`. Called on
                any thread; must not block.
            told: called with the lease and its blocks, with more blocks, or with an error; see `Acquirer.start`. Called
                on any thread; must not block.
        """
        self._acquirer.start(request, cancellation, renewed, told)

    def drop(self, acquired: Acquired) -> None:
        """Stop renewing a lease whose read has ended."""
        self._renewals.drop(acquired.lease)

    def let_go(self, home: Control, granted: Acquired) -> None:
        """Give back a lease whose read will not begin: renew it no more, and tell its home."""
        self.drop(granted)
        self._give_up(home, granted.lease, pb.RANK_OUTCOME_CANCELLED)

    def report(self, home: Control, reports: Sequence[ReadReport]) -> None:
        """Report the ends of reads to their home. Each report is repeated until its lease ends, if need be."""
        messages = [
            Message(notification, report.lease.deadline, partial(_verdict, report.answered))
            for report in reports
            for notification in read_done(report.lease.lease_id, report.shares)
        ]
        self._teller.tell(home, messages, timeout=VERDICT_TIMEOUT)

    def cancel(self, home: Control, lease: ReaderLease) -> None:
        """End a lease at its home. If the home cannot be reached, the lease ends by time (PROTOCOL, Leases 7)."""
        self._teller.tell(home, [Message(_cancelled(lease), lease.deadline)])

    def decline(self, reference: str, leases: Sequence[ReaderLease] = ()) -> None:
        """Tell the home that nobody will read a publication, and end the leases on it (PROTOCOL, Leases 8).

        The message is repeated for `DECLINE_PATIENCE` if the home cannot be reached, or is recovering.

        Raises:
            BadReference, HomeNotAllowed: see `request`.
        """
        home = self._homes.of(parse_reference(reference))
        decline = pb.Notification(decline=pb.Decline(reference=reference))
        until = now() + DECLINE_PATIENCE
        self._teller.tell(home, [Message(told, until) for told in (*map(_cancelled, leases), decline)])

    def close(self, timeout: float) -> None:
        """Stop acquiring leases and repeating messages. Idempotent.

        Args:
            timeout: seconds to wait for the messages that were sent already.
        """
        until = now() + timeout
        self._acquirer.close(timeout)
        self._teller.close(max(0.0, until - now()))

    def _give_up(self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType) -> None:
        """End a lease that is not needed. If other ranks share it, it ends for this rank only."""
        if self._rank is None:
            self.cancel(home, lease)
        else:
            done = read_done(lease.lease_id, [pb.RankReport(rank=self._rank, outcome=outcome)])
            self._teller.tell(home, [Message(notification, lease.deadline) for notification in done])


def _cancelled(lease: ReaderLease) -> pb.Notification:
    return pb.Notification(cancel=pb.CancelRead(lease_id=lease.lease_id))


def _verdict(answered: Callable[[pb.Verdict.ValueType | None], None], result: pb.NotificationResult | None) -> None:
    ended = result is not None and result.WhichOneof("kind") == "read_ended"
    answered(result.read_ended.verdict if result is not None and ended else None)
