"""Destination engines: the shipped lease and verdict, and around them the calls of `Acquisition`, `Renewals` and
`LeasedReads`. Their ranks copy piece by piece, when the machine chooses so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from kvferry._clock import from_duration, to_duration
from kvferry._control.granted_steps import GrantedSteps
from kvferry._control.reader_lease import ReaderLease, ReaderVerdict, verdict_of
from kvferry._control.right_prompt import PromptCheck
from kvferry._wire.reference import parse_reference
from kvferry._wire.status import from_notification_error
from kvferry.errors import KvferryError, LeaseEnded, WrongKey
from kvferry.geometry.blocks import Blocks
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.model.clocks import PartyClock, Violation
from tests.model.network import Network, Pipe
from tests.model.prompts import Errand, OwnPrompt
from tests.model.source import LAYERS, Memory, Offered, Routed
from tests.support.parties import BLOCK
from tests.support.references import without_marks

PATIENCE = 6.0
"""Seconds that a reader waits for a publication."""


Piece: TypeAlias = tuple[int, tuple[int, ...]]
"""A unit of copying: a block, and some of its layers."""


class Reader:
    """One destination engine.

    Attributes:
        fell_behind: its clock was paused once, so that only the home's answer counts.
        prompt_check: its use of marks.
    """

    def __init__(self, name: str, clock: PartyClock) -> None:
        self.engine = pb.EngineRef(engine_id=name, incarnation=name.encode().ljust(16, b"."))
        self.clock = clock
        self.fell_behind = False
        self.prompt_check = PromptCheck.COMPARE


@dataclass(eq=False)
class Share:
    """The part of one process in a read: a single rank, or a scheduler that acts for all ranks.

    Attributes:
        offered: the publication that it reads; a router's reference until the home accepts the read.
        ranks: the ranks whose copies it reports.
        pieces: granted, in order.
        copies: contents that each rank has copied so far.
        granted: all blocks are known.
        progressive: its ranks copy known blocks while the source still publishes, also layer by layer.
        ended_at: when its last copy ended, as far as it knows.
        copied_at: when its last copy ended.
        over: it does not rely on the lease any more: it has a verdict, has given up or is dead.
        good: its engine got the bytes.
        refused: the KV is, or may be, of another prompt.
        read_after_release: a rank copied a block after its source had taken the block back.
        orphaned: the source has been restarted since. Until it is back, a stranger's engine may be the only one of its
            name, which is what the reference can mean.
    """

    reader: Reader
    offered: Offered | Routed
    read_id: str
    parties: int
    ranks: tuple[int, ...]
    network: Network
    memory: Memory
    find: Callable[[pb.Accepted], Offered]
    errand: Errand
    lease: ReaderLease | None = None
    pieces: list[Piece] = field(default_factory=list)
    copies: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    granted: bool = False
    progressive: bool = False
    ended_at: float | None = None
    copied_at: float = 0.0
    read_after_release: bool = False
    orphaned: bool = False
    over: bool = False
    good: bool = False
    refused: bool = False
    _pipe: Pipe[pb.ReadBlocksResponse] | None = None
    _ask_after: float = 0.0
    _deadline: float = 0.0
    _again_after: float | None = None
    _reported: bool = False
    _told_under: bytes = b""
    """The lease_id under which it received its steps."""
    _steps: GrantedSteps = field(default_factory=GrantedSteps)
    _marked: set[int] = field(default_factory=set)
    """Ends of the marks that it received."""
    _published: int = 0
    """The end of the complete blocks that it received."""

    def __post_init__(self) -> None:
        self._own = OwnPrompt(self.errand, self.reader.prompt_check)

    def start(self) -> None:
        self._deadline = self.reader.clock.now() + PATIENCE
        given = self.offered if isinstance(self.offered, Offered) else None
        if self._own.refuses(parse_reference(self._reference), given):
            self.over = self.refused = True
        else:
            self._ask()

    @property
    def relies(self) -> bool:
        """Whether it believes that it has a live lease, and has not reported."""
        return not (self.over or self._reported) and self.lease is not None and self.lease.live(self.reader.clock.now())

    # Work of its threads.

    def step(self) -> bool:
        """Do the next work that needs no event. Returns whether there was any."""
        now = self.reader.clock.now()
        if self.over or self._reported:
            return False
        if self.lease is not None and self.lease.next_renewal is not None and self.lease.next_renewal <= now:
            self.renew()
            return True
        if self.lease is not None and self._again_after is not None and self._again_after <= now:
            self._acquire_again(self.lease)
            return True
        if self.granted:
            if self.ended_at is None:
                return False
            self._finish()
            return True
        if self._pipe is None and self._ask_after <= now:
            self._ask()
            return True
        return False

    def copy(self, rank: int) -> None:
        """A rank copies its next block."""
        copied = self.copies[rank]
        self.read_after_release |= self._found.free
        self._own.check_moves(self._found, self._marked)
        copied.append(_of(self.memory.contents, self.pieces[len(copied)]))
        self.copied_at = self.reader.clock.now()
        self._look_whether_all_is_copied()

    def copying(self) -> list[int]:
        """Ranks that have something left to copy."""
        if self.over:
            return []
        return [rank for rank, copied in self.copies.items() if len(copied) < len(self.pieces)]

    @property
    def blocks(self) -> set[int]:
        """The blocks that it knows of."""
        return {block for block, _ in self.pieces}

    @property
    def begun(self) -> bool:
        """Whether its ranks were told of blocks: from then on it has one lease, or none."""
        return bool(self.copies)

    def renew(self) -> None:
        lease = self.lease
        if lease is None or lease.next_renewal is None or self.over:
            return
        sent_at = self.reader.clock.now()
        lease.renewing(sent_at)
        lease_id = lease.lease_id

        def answered(answer: object) -> None:
            result = result_of(answer)
            if isinstance(result, LeaseEnded) and not self.over and lease is self.lease:
                self._acquire_again(lease)
            if isinstance(result, KvferryError) or self.over:
                return
            remaining = from_duration(result.renewed.remaining)
            more = result.renewed.revoked == pb.REVOKE_REASON_UNSPECIFIED
            lease.renewed(sent_at, self.reader.clock.now(), remaining, more=more)

        self._notify(pb.Notification(renew=pb.Renew(lease_id=lease_id)), answered)

    def give_up(self, *, cancel: bool) -> None:
        """Give the read up."""
        if self.over:
            return
        self._end()
        if self.lease is None or self._reported:
            return
        if cancel and len(self.ranks) == self.parties:
            self._notify(pb.Notification(cancel=pb.CancelRead(lease_id=self.lease.lease_id)), lambda _: None)
        else:
            self._report(pb.RANK_OUTCOME_CANCELLED, lambda _: None)

    def die(self) -> None:
        self._end()
        self.network.abandon(self)

    # Asking.

    def _ask(self) -> None:
        now = self.reader.clock.now()
        sent_at, left = now, self._deadline - now
        if left <= 0:
            self.give_up(cancel=False)
            return

        def on_message(answer: pb.ReadBlocksResponse) -> None:
            self._leave(pipe)
            if not answer.HasField("accepted") or self._takes_lease(answer.accepted, sent_at):
                self._take_answer(answer)

        def on_end(error: KvferryError | None) -> None:
            if self._pipe is not pipe:
                return
            self._pipe = None
            if isinstance(error, WrongKey) and not (self.errand.invented or self.orphaned):
                raise Violation(f"R13: {self.read_id} has the right key, and was told that it is another's")
            if error is not None and not error.retryable:
                self.give_up(cancel=False)
            else:
                self._ask_anew(max(0.02, (error.retry_after or 0) if error else 0))

        pipe = self._pipe = Pipe[pb.ReadBlocksResponse](on_message, on_end)
        request = self._request(to_duration(left), self._told_under, len(self._steps))
        self.network.open(self, lambda host: host.read_blocks(request), pipe)

    def _ask_anew(self, pause: float) -> None:
        """Ask again after a failure. A read that has not begun starts from the beginning."""
        self._ask_after = self.reader.clock.now() + pause
        if self.begun:
            return
        if self.lease is not None:
            self.lease.end()
        self.lease, self.pieces, self._again_after = None, [], None
        self._told_under, self._steps = b"", GrantedSteps()
        self._marked, self._published = set(), 0

    def _takes_lease(self, accepted: pb.Accepted, sent_at: float) -> bool:
        """As `Acquisition._accept`. Returns whether to take the steps in the same answer."""
        remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
        if self.lease is not None and not self.begun:
            # The home has lost the lease.
            self._ask_anew(0.02)
            return False
        self._accepted(accepted)
        if self.lease is None:
            self.lease = ReaderLease(accepted.lease_id, sent_at, remaining, every)
        elif not self.lease.acquired_again(accepted.lease_id, sent_at, self.reader.clock.now(), remaining):
            self.give_up(cancel=False)
            return False
        self._told_under = accepted.lease_id
        self._steps.again()
        return True

    def _take_answer(self, answer: pb.ReadBlocksResponse) -> None:
        for step in answer.blocks:
            self._take(step)
        complete = answer.HasField("complete")
        if (answer.blocks or complete) and not self._compares(complete=complete):
            return
        if complete:
            self.granted = True
            self._begin()
            self._look_whether_all_is_copied()
        elif answer.HasField("revoked"):
            self.give_up(cancel=False)
        elif self.progressive and self.pieces:
            self._begin()

    def _take(self, step: pb.Blocks) -> None:
        """Add what a step grants, which may be further layers of blocks that it knows of."""
        try:
            self._steps.add([step])
            part = self._steps.take()
        except KvferryError as error:
            raise Violation(f"R1: a reader was told what its source did not publish: {error}") from error
        self._marked |= {mark.end for mark in step.marks}
        self._published = max((self._published, *(group.end_token for group in step.groups)))
        known = dict[int, set[int]]()
        for block, layers in self.pieces:
            known.setdefault(block, set()).update(layers)
        every: Sequence[int] = range(len(LAYERS))
        granted = [(block, every) for found in part.blocks.values() for block in self._wanted(found)]
        if self.progressive and part.unfinished is not None:
            named = sorted(map(LAYERS.index, part.unfinished.layers))
            granted += [(block, named) for runs in part.unfinished.groups for block in self._wanted(runs.blocks())]
        for block, named_now in granted:
            if new := tuple(layer for layer in named_now if layer not in known.get(block, ())):
                self.pieces.append((block, new))

    def _wanted(self, blocks: Blocks) -> list[int]:
        """Return the ids of the blocks that it takes."""
        limit = self._own.limit
        ids: list[int] = blocks.ids.tolist()
        return ids if limit is None else ids[: max(0, -(-(limit - blocks.first_token) // BLOCK))]

    def _compares(self, *, complete: bool) -> bool:
        """Compare the home's marks before any bytes move, as `Acquisition._take`."""
        if self.errand.invented:
            raise Violation(f"R13: {self.read_id} was told blocks by a reference that nobody has made")
        own = parse_reference(self._reference)
        if not self._own.told(self._steps.marks, own, self._found, self._published, complete=complete):
            self._refuse()
        return not self.over

    def _begin(self) -> None:
        """Let its ranks begin, unless they have; as `LeasedReads.takes`, and then `_follow`."""
        if self._own.judges(self._found, self._published, complete=self.granted):
            self.copies = self.copies or {rank: [] for rank in self.ranks}
        else:
            self._refuse()

    def _refuse(self) -> None:
        """Refuse the KV of another prompt. Nothing is declined."""
        self.refused = True
        if not self.begun and len(self.ranks) == self.parties:
            self.give_up(cancel=True)
        else:
            self._end()
            self._report(pb.RANK_OUTCOME_FAILED, lambda _: None)

    def _look_whether_all_is_copied(self) -> None:
        if self.granted and not self.over and all(len(copied) == len(self.pieces) for copied in self.copies.values()):
            self.ended_at = self.reader.clock.now()

    def _leave(self, pipe: Pipe[pb.ReadBlocksResponse]) -> None:
        """Losing the call ends nothing."""
        self._pipe = None
        self.network.cut(pipe)

    def _acquire_again(self, lease: ReaderLease) -> None:
        """The home has restarted: until the old deadline, ask for the same read again."""
        sent_at, self._again_after = self.reader.clock.now(), None

        def on_message(message: pb.ReadBlocksResponse) -> None:
            accepted, now = message.accepted, self.reader.clock.now()
            lease.acquired_again(accepted.lease_id, sent_at, now, from_duration(accepted.remaining))
            pipe.on_end = lambda _: None
            self.network.cut(pipe)

        def on_end(error: KvferryError | None) -> None:
            now = self.reader.clock.now()
            if lease is self.lease and lease.live(now) and error is not None and error.retryable:
                self._again_after = now + max(0.02, error.retry_after or 0.0)

        pipe = Pipe[pb.ReadBlocksResponse](on_message, on_end)
        request = self._request(None)
        self.network.open(self, lambda host: host.read_blocks(request), pipe)

    @property
    def _found(self) -> Offered:
        return cast(Offered, self.offered)

    @property
    def _reference(self) -> str:
        given = self.offered.reference if isinstance(self.offered, Routed) else self.offered.publication.reference
        return self.errand.reference or given

    def _accepted(self, accepted: pb.Accepted) -> None:
        """R1, R13: a router's key gives the publication under exactly that key."""
        if not isinstance(self.offered, Routed) or self.errand.invented:
            return
        found = self.find(accepted)
        if found.routed is not self.offered or accepted.reference != without_marks(found.publication.reference):
            raise Violation(f"R1: {self.read_id} of {self.offered.name} was given publication {found.number}")
        self.offered = found

    def _request(self, wait: object, lease_id: bytes = b"", next_step: int = 0) -> pb.ReadBlocksRequest:
        return pb.ReadBlocksRequest(
            reference=self._reference,
            reader=self.reader.engine,
            read_id=self.read_id.encode().ljust(16, b"."),
            parties=self.parties,
            wait=wait,  # type: ignore[arg-type]
            lease_id=lease_id,
            next_step=next_step,
        )

    # The end.

    def _finish(self) -> None:
        """As `LeasedReads._conclude`."""
        lease, ended_at = cast(ReaderLease, self.lease), cast(float, self.ended_at)
        if verdict_of(ended_at, lease.deadline, None) is ReaderVerdict.EXPIRED:
            self._report(pb.RANK_OUTCOME_EXPIRED, lambda _: None)
            self._end()
            return

        def answered(answer: object) -> None:
            result = result_of(answer)
            verdict = None if isinstance(result, KvferryError) else result.read_ended.verdict
            if self.over:
                return
            found = verdict_of(ended_at, lease.deadline, verdict)
            if found is not ReaderVerdict.EXPIRED:
                self._check_good(found, ended_at, lease.deadline)
            self._end()
            if verdict is None:
                self._report(pb.RANK_OUTCOME_DONE, lambda _: None)

        self._reported = True
        self._report(pb.RANK_OUTCOME_DONE, answered)

    def _check_good(self, found: ReaderVerdict, ended_at: float, deadline: float) -> None:
        """R1: what the engine is given is what was published."""
        self.good = True
        if self.reader.fell_behind and found is ReaderVerdict.TRUSTED:
            return
        ended_at = max(ended_at, self.copied_at)
        if ended_at >= deadline:
            raise Violation(f"R1: a read that ended at {ended_at} counts, its deadline was {deadline}")
        if self.read_after_release:
            raise Violation("R1: a read counts that copied blocks after they were released")
        contents = self._own.taken(self._found)
        pieces = {(block, layer) for block, layers in self.pieces for layer in layers}
        if pieces != {(block, layer) for block in contents for layer in range(len(LAYERS))}:
            raise Violation(f"R1: {sorted(pieces)} count, all layers of blocks {sorted(contents)} were published")
        published = [_of(contents, piece) for piece in self.pieces]
        for rank, copied in self.copies.items():
            if copied != published:
                raise Violation(f"R1: rank {rank} was given {copied}, published was {published}")
            written = {number for piece in copied for number in piece}
            self._own.check_good(self._found, [self.memory.origins.get(number) for number in written])

    def _report(self, outcome: pb.RankOutcome.ValueType, end: object) -> None:
        lease = cast(ReaderLease, self.lease)
        self._found.reported |= outcome == pb.RANK_OUTCOME_DONE
        reports = [pb.RankReport(rank=rank, outcome=outcome) for rank in self.ranks]
        done = pb.ReadDone(lease_id=lease.lease_id, reports=reports)
        self._notify(pb.Notification(read_done=done), end)

    def _notify(self, notification: pb.Notification, end: object) -> None:
        request = pb.NotifyRequest(sender=self.reader.engine, notifications=[notification])
        self.network.call(self, lambda host: host.notify(request), end)  # type: ignore[arg-type]

    def _end(self) -> None:
        self.over = True
        if self.lease is not None:
            self.lease.end()
        if self._pipe is not None:
            self._leave(self._pipe)


def _of(contents: Mapping[int, tuple[int, ...]], piece: Piece) -> tuple[int, ...]:
    block, layers = piece
    return tuple(contents[block][layer] for layer in layers)


def result_of(answer: object) -> pb.NotificationResult | KvferryError:
    if isinstance(answer, KvferryError):
        return answer
    (result,) = cast(pb.NotifyResponse, answer).results
    if result.WhichOneof("kind") == "error":
        return from_notification_error(result.error)
    return result
