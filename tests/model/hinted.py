"""Reads whose blocks come from the hint in their reference, as `LeasedReads` leads them (PROTOCOL, Optimistic
reads)."""

from __future__ import annotations

import math
from typing import cast

from kvferry._clock import from_duration
from kvferry._control.reader_lease import ReaderLease, ReaderVerdict
from kvferry._wire.publication import granted_by
from kvferry._wire.reference import hint_digest, parse_reference
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.model.network import Pipe
from tests.model.readers import PATIENCE, Share, result_of
from tests.model.source import BLOCKS, Offered

ASK_AGAIN = 0.05
"""Seconds after which a home that has not answered is asked again."""


class HintedShare(Share):
    """A read without a lease, by the process that has all of its ranks.

    Attributes:
        alters: the router changes the hint.
    """

    alters = False
    _hint: bytes = b""
    _validate_after = 0.0

    def start(self) -> None:
        reference = parse_reference(self._reference) if isinstance(self.offered, Offered) else pb.Reference()
        if not reference.hint or self.errand.invented or len(self.ranks) != self.parties:
            super().start()
            return
        self._deadline = self.reader.clock.now() + PATIENCE
        self._hint, hint = reference.hint, pb.Hint.FromString(reference.hint)
        if self.alters:
            group = hint.groups[0]
            group.run_starts[0] = group.run_starts[0] % BLOCKS + 1
            self._hint = hint.SerializeToString()
        if self._own.refuses(reference, cast(Offered, self.offered)):
            self.over = self.refused = True
            return
        self._take(granted_by(hint)[0])
        if self._compares(complete=True):
            self.granted = True
            self._begin()
            self._look_whether_all_is_copied()

    def step(self) -> bool:
        if self._hint and self.lease is None:
            if self.over or self._reported or self.ended_at is None:
                return False
            if self._validate_after > self.reader.clock.now():
                return False
            self._validate()
            return True
        return super().step()

    def lease_it(self) -> None:
        """The read takes long: ask for a lease, under which it goes on."""
        if not self._hint or self.over or self._reported or self.lease is not None or self.ended_at is not None:
            return
        sent_at = self.reader.clock.now()

        def on_message(answer: pb.ReadBlocksResponse) -> None:
            self._leave(pipe)
            if self.over or self._reported or not answer.HasField("accepted"):
                return
            hint = pb.Hint.FromString(self._hint)
            if [blocks.groups for blocks in answer.blocks] != [hint.groups]:
                self.give_up(cancel=True)
                return
            accepted = answer.accepted
            remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
            self.lease = ReaderLease(accepted.lease_id, sent_at, remaining, every)
            self._told_under = accepted.lease_id

        def on_end(error: KvferryError | None) -> None:
            if self._pipe is pipe:
                self._pipe = None
                if error is not None and not error.retryable:
                    self.give_up(cancel=True)

        pipe = self._pipe = Pipe[pb.ReadBlocksResponse](on_message, on_end)
        request = self._request(None)
        self.network.open(self, lambda host: host.read_blocks(request), pipe)

    def give_up(self, *, cancel: bool) -> None:
        if self._hint and self.lease is None:
            self._end()
        else:
            super().give_up(cancel=cancel)

    def _refuse(self) -> None:
        if self._hint and self.lease is None:
            self.refused = True
            self._end()
        else:
            super()._refuse()

    def _validate(self) -> None:
        """Ask the home, after the last byte, whether the bytes count."""
        if self._pipe is not None:
            # The lease came too late.
            self._leave(self._pipe)
        self._reported = True
        reports = [pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE) for rank in self.ranks]
        validate = pb.Validate(
            reference=self._reference,
            # Another than that of a lease which came too late.
            read_id=self._request(None).read_id[::-1],
            hint_digest=hint_digest(self._hint),
            parties=self.parties,
            reports=reports,
        )
        cast(Offered, self.offered).reported = True

        def answered(answer: object) -> None:
            result = result_of(answer)
            if self.over:
                return
            if isinstance(result, KvferryError):
                self._reported = False
                self._validate_after = self.reader.clock.now() + ASK_AGAIN
                if not result.retryable or self.reader.clock.now() >= self._deadline:
                    self._end()
                return
            if result.read_ended.verdict == pb.VERDICT_VALID:
                # No clock decides.
                self._check_good(ReaderVerdict.CONFIRMED, cast(float, self.ended_at), math.inf)
            self._end()

        self._notify(pb.Notification(validate=validate), answered)
