"""The source engine: the shipped publications of an engine, and around them the calls of `EngineSession` and `Watcher`.

Its engine is the least careful that keeps the contract: it overwrites blocks as soon as they are released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from kvferry._clock import from_duration
from kvferry._control.backoff import BACKOFF_FIRST
from kvferry._control.publications import Offers, Publication
from kvferry._control.publish import follow
from kvferry._wire.authority import incarnation_of
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry._wire.reference import parse_reference
from kvferry._wire.status import from_notification_error
from kvferry.errors import BadBlock, InvalidField, KvferryError, PeerRestarted, RouterKeyUsed, WrongSession
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.values import EngineRef
from tests.model.clocks import PartyClock, Violation
from tests.model.host import ADVERTISE, Host, Pulled
from tests.model.network import Call, Network, Pipe
from tests.model.prompts import WHOLE, Request, Said
from tests.support.parties import BLOCK, registration

ENGINE_ID = "prefill"
BLOCKS = 6
LAYERS = ("layer-0", "layer-1", "layer-2")
"""Layers of a block. They are computed, and may be published, one after the other."""
BATCH = 2
"""Notifications per call of a snapshot: few, so that a snapshot takes several calls."""


@lru_cache(maxsize=256)
def registered(ref: EngineRef) -> Registration:
    return registration(ref)


class Memory:
    """Contents of the source's blocks: for each layer a number that changes with every write.

    Attributes:
        origins: the request that each number was computed from, and which of its blocks it is.
    """

    def __init__(self) -> None:
        self.contents = dict.fromkeys(range(1, BLOCKS + 1), (0,) * len(LAYERS))
        self.origins: dict[int, tuple[Request, int]] = {}
        self._writes = 0

    def write(
        self, block: int, first: int = 0, end: int = len(LAYERS), origin: tuple[Request, int] | None = None
    ) -> None:
        """Write layers `first` to `end` of a block."""
        self._writes += 1
        if origin is not None:
            self.origins[self._writes] = origin
        before = self.contents[block]
        self.contents[block] = (*before[:first], *(self._writes,) * (end - first), *before[end:])


@dataclass(eq=False)
class Routed:
    """A reference that a router made, and sent to source and readers at once."""

    reference: str
    request: Request = WHOLE
    """The request that the reference was made for."""
    declined: bool = False

    @property
    def name(self) -> str:
        return parse_reference(self.reference).router_key


@dataclass(eq=False)
class Offered:
    """A publication at its engine, with state for the checks."""

    source: Source
    publication: Publication
    said: Said
    routed: Routed | None = None
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By block, unfinished ones included."""
    computed: int = 0
    """Layers of its unfinished blocks that are computed."""
    complete: bool = False
    releases: int = 0
    free: bool = False
    """The engine has the blocks back: released, or never offered."""
    aborted: bool = False
    """The home has acknowledged the engine's abort."""
    given_up: bool = False
    """A bearer of the reference has declined."""
    reported: bool = False
    """A rank has reported a read as done."""
    outcome: ReleaseOutcome | None = None

    @property
    def number(self) -> int:
        return self.publication.number

    @property
    def declined(self) -> bool:
        """Whether a bearer of a reference has declined."""
        return self.given_up or (self.routed is not None and self.routed.declined)


@dataclass(eq=False)
class Sending:
    """One run of `EngineSession.send`."""

    offered: Offered
    step: pb.Publish
    blocks: tuple[int, ...]
    call: Call | None = None
    after: float = 0.0


BeforeWrite = Callable[[Offered | None, Sequence[int]], None]
"""Called before blocks are written, with the publication whose blocks they were: all of its blocks, at its release.
None: blocks that were never offered."""


class Source:
    """One incarnation.

    Args:
        secret: the session secret.
        before_write: see `BeforeWrite`.
    """

    def __init__(
        self,
        secret: bytes,
        clock: PartyClock,
        network: Network,
        memory: Memory,
        before_write: BeforeWrite,
    ) -> None:
        self.ref = ref = EngineRef(ENGINE_ID, incarnation_of(secret))
        self.engine = pb.EngineRef(engine_id=ref.engine_id, incarnation=ref.incarnation)
        self.clock = clock
        self.network = network
        self.memory = memory
        self.offers = Offers(self.engine, secret)
        self.offered: dict[int, Offered] = {}
        self.free: list[int] = []
        self.alive = True
        self.sendings: list[Sending] = []
        self.pipe: Pipe[pb.WatchResponse] | None = None
        self.watch_request = pb.WatchRequest(engine=self.engine, session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER)
        self._before_write = before_write
        self._secret = secret
        self._registered = False
        self._usable_at: float | None = None
        self._busy = False
        self._watch_after = 0.0

    # The engine.

    @property
    def ready(self) -> bool:
        """Whether it can publish: it is registered, and may write to its memory."""
        return self.alive and self._registered and self._usable_at is None

    @property
    def can_publish(self) -> bool:
        """Whether it can publish now: one first step at a time, into free blocks."""
        first = any(sending.step.step == 0 for sending in self.sendings)
        return self.ready and bool(self.free) and not first

    def publish(
        self,
        count: int,
        *,
        last: bool,
        expected_reads: int,
        routed: Routed | None = None,
        by_layers: bool = False,
        said: Said | None = None,
    ) -> Offered:
        """Publish blocks; with `by_layers` only their first layer, and then not as the last step.

        Raises:
            RouterKeyUsed: the router has used its reference twice.
        """
        said = said or Said()
        step = pb.Publish(request_id="request", last=last and not by_layers, expected_reads=expected_reads)
        blocks = self._add_blocks(step, 0, count, said.request, by_layers=by_layers)
        _end(step, said.request)
        if routed is not None:
            step.router_key, step.key = routed.name, parse_reference(routed.reference).key
        try:
            publication = self.offers.publish(ADVERTISE, step, prompt=said.step(step))
        except RouterKeyUsed:
            self._take(None, blocks)
            raise
        offered = Offered(self, publication, said, routed)
        self.offered[offered.number] = offered
        self._send(offered, step, blocks)
        return offered

    def publish_more(self, offered: Offered, count: int, *, last: bool, by_layers: bool = False) -> None:
        """Publish a further step. With `by_layers`: the next layer of the unfinished blocks; at their last layer, also
        the first layer of new blocks."""
        number = offered.number
        begun = self.offers.unfinished(number)
        step = pb.Publish(last=last and not by_layers)
        blocks: tuple[int, ...] = ()
        if by_layers and begun and offered.computed + 1 < len(LAYERS):
            self._compute(offered, begun, offered.computed + 1)
            step.unfinished.layers.append(LAYERS[offered.computed - 1])
        else:
            self._compute(offered, begun, len(LAYERS))
            request = offered.said.request
            blocks = self._add_blocks(step, len(offered.contents), count, request, by_layers=by_layers)
            if not by_layers:
                follow(begun, step)
            elif begun:
                # Both in one step, unlike the SDK's sources.
                step.groups.extend(begun)
            if not begun:
                _end(step, request)
        # The step's number is set when it is added; any but 0 marks a further step.
        step.step = 1
        self.offers.publish_more(number, step, offered.said.step(step))
        self._send(offered, step, blocks)

    def abort(self, offered: Offered) -> None:
        def answered(answer: object) -> None:
            offered.aborted |= (
                not isinstance(answer, KvferryError) and _error_of(cast(pb.NotifyResponse, answer)) is None
            )

        self.offers.abort(offered.number)
        self._notify([pb.Notification(abort=pb.Abort(publication=offered.number))], answered)

    def poll(self) -> None:
        """Take the released publications, and reuse their blocks at once."""
        now = self.clock.now()
        self.offers.advance(now)
        for release in self.offers.take_released():
            offered = self.offered[release.publication]
            offered.releases += 1
            if offered.releases > 1 or offered.free:
                raise Violation(f"R3: publication {offered.number} was released {offered.releases} times")
            offered.outcome = release.outcome
            self._check_outcome(offered, release.outcome)
            self._take(offered, tuple(offered.contents))
        if self._usable_at is not None and now >= self._usable_at:
            self._usable_at = None
            self._take(None, tuple(self.memory.contents))

    def retire(self, caller: object) -> None:
        """Retire this incarnation, without waiting for an answer."""
        retire = pb.Notification(retire=pb.Retire())
        request = pb.NotifyRequest(sender=self.engine, session_secret=self._secret, notifications=[retire])
        self.network.call(caller, lambda host: host.notify(request), lambda _: None)

    def end(self) -> None:
        """The process is gone; its memory stays as it is."""
        self.alive = False
        self.network.abandon(self)
        if self.pipe is not None:
            self.network.cut(self.pipe)

    # Its session.

    def step(self) -> bool:
        """Do the next work of the session's threads. Returns whether there was any."""
        if not self.alive:
            return False
        now = self.clock.now()
        if self.pipe is None and not self._busy and self._watch_after <= now:
            self._open_watch()
            return True
        idle = [sending for sending in self.sendings if sending.call is None and sending.after <= now]
        for sending in idle:
            self._attempt(sending)
        return bool(idle)

    def disown(self, sending: Sending) -> None:
        """The step's time is up."""
        if sending.call is not None:
            self.network.give_up(sending.call)
        if sending in self.sendings:
            self._given_up(sending)

    def _open_watch(self) -> None:
        request = pb.WatchRequest()
        request.CopyFrom(self.watch_request)
        pipe = Pipe[pb.WatchResponse](self._on_message, self._on_watch_end, lambda: not self._busy)
        self.pipe = pipe
        self.network.open(self, lambda host: host.watch(request), pipe)

    def late_watch(self) -> Callable[[Host], Pulled[pb.WatchResponse]]:
        """Return the Watch that a process tried to open before it ended, for a network that delays it."""
        request = pb.WatchRequest()
        request.CopyFrom(self.watch_request)
        return lambda host: host.watch(request)

    def _on_watch_end(self, error: KvferryError | None) -> None:
        self.pipe = None
        self._check_not_evicted(error)
        self._watch_after = self.clock.now() + _pause(error)

    def _on_message(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "opened":
            opened = message.opened
            self.offers.final = max(from_duration(opened.times.final), from_duration(opened.times.max_ttl))
            if not self._registered and not opened.resumed:
                self._register(lambda: None)
        elif kind == "released":
            self.offers.released(message.released)
            ack = pb.ReleasedAck(publications=[message.released.publication])
            self._notify([pb.Notification(released_ack=ack)], lambda _: None)
            self.poll()
        if self.watch_request.resume_epoch != message.home_epoch:
            self.watch_request.resume_epoch = message.home_epoch
            self.watch_request.resume_sequence = 0
        self.watch_request.resume_sequence = max(message.sequence, self.watch_request.resume_sequence)
        if kind == "synced" and message.synced.need_resync:
            # The watch's thread reads no further message until the snapshot is sent.
            self._busy = True
            self._register(self._refill)

    def _register(self, then: Callable[[], None]) -> None:
        secret, ref = self._secret, self.ref

        def answered(answer: object) -> None:
            if isinstance(answer, KvferryError):
                self._check_not_evicted(answer)
                self._watch_anew()
                return
            if not self._registered:
                self._registered = True
                self._usable_at = self.clock.now() + cast(float, answer)
            then()

        self.network.call(self, lambda host: host.register(registered(ref), secret), answered)

    def _refill(self) -> None:
        snapshot = self.offers.snapshot()
        rest = [*snapshot.notifications, snapshot.end]

        def done() -> None:
            self.offers.snapshot_sent(snapshot, self.clock.now())
            self._busy = False

        def answered(answer: object) -> None:
            if isinstance(answer, KvferryError):
                self._check_not_evicted(answer)
                done()
                self._watch_anew()
            else:
                proceed()

        def proceed() -> None:
            if not rest:
                done()
                return
            batch, rest[:BATCH] = rest[:BATCH], []
            self._notify(batch, answered)

        proceed()

    def _watch_anew(self) -> None:
        self._busy = False
        if self.pipe is not None:
            self.network.cut(self.pipe)

    # Its publishes.

    def _send(self, offered: Offered, step: pb.Publish, blocks: tuple[int, ...]) -> None:
        offered.contents |= {block: self.memory.contents[block] for block in blocks}
        offered.complete = step.last
        if step.unfinished.groups:
            offered.computed = 1
        sending = Sending(offered, step, blocks)
        self.sendings.append(sending)
        self._attempt(sending)

    def _attempt(self, sending: Sending) -> None:
        def answered(answer: object) -> None:
            sending.call = None
            if not isinstance(answer, KvferryError):
                answer = _error_of(cast(pb.NotifyResponse, answer))
            if answer is None:
                self._sent(sending)
                return
            self._check_not_evicted(answer)
            if isinstance(answer, (InvalidField, BadBlock)):
                raise Violation(f"a step that continues the one before was refused: {answer}")
            if answer.retryable:
                # `step` tries again, `disown` gives up.
                sending.after = self.clock.now() + _pause(answer)
                return
            self._given_up(sending)

        notification = pb.Notification(publish=sending.step)
        sending.call = self._notify([notification], answered)

    def _given_up(self, sending: Sending) -> None:
        self.sendings.remove(sending)
        number = sending.offered.number
        self.offers.abort(number)
        abort = pb.Notification(abort=pb.Abort(publication=number))
        self._notify([abort], lambda _: self.offers.sent(number, self.clock.now()))

    def _sent(self, sending: Sending) -> None:
        self.sendings.remove(sending)
        self.offers.sent(sending.offered.number, self.clock.now())

    def _add_blocks(
        self, step: pb.Publish, first: int, count: int, request: Request, *, by_layers: bool
    ) -> tuple[int, ...]:
        """Write free blocks, or only their first layer, and add them to a step. Returns them."""
        blocks = tuple(self.free[:count])
        del self.free[:count]
        for index, block in enumerate(blocks, first):
            self.memory.write(block, end=1 if by_layers else len(LAYERS), origin=(request, index))
        if by_layers:
            step.unfinished.CopyFrom(pb.Unfinished(groups=[group(first, blocks)], layers=LAYERS[:1]))
        elif blocks:
            step.groups.append(group(first, blocks))
        return blocks

    def _compute(self, offered: Offered, begun: Sequence[pb.GroupBlocks], end: int) -> None:
        """Write the next layers of unfinished blocks, up to `end`."""
        for block in [block for blocks in begun for block in blocks.run_starts]:
            index = list(offered.contents).index(block)
            self.memory.write(block, offered.computed, end, (offered.said.request, index))
            offered.contents[block] = self.memory.contents[block]
        offered.computed = end

    def _take(self, offered: Offered | None, blocks: Sequence[int]) -> None:
        """Take blocks back, and write to them at once."""
        if offered is not None:
            offered.free = True
        self._before_write(offered, blocks)
        for block in blocks:
            self.memory.write(block)
        self.free += blocks

    def _notify(self, notifications: Sequence[pb.Notification], end: Callable[[object], None]) -> Call:
        request = pb.NotifyRequest(sender=self.engine, session_secret=self._secret, notifications=notifications)
        return self.network.call(self, lambda host: host.notify(request), end)

    def _check_outcome(self, offered: Offered, outcome: ReleaseOutcome) -> None:
        """R13: no peer can report or decline a read for others without the right to."""
        if outcome is ReleaseOutcome.READ and not offered.reported:
            raise Violation(f"R13: publication {offered.number} was released as read, and nobody has said so")
        if outcome is ReleaseOutcome.DECLINED and not offered.declined:
            raise Violation(f"R13: publication {offered.number} was declined, and nobody has")

    def _check_not_evicted(self, error: KvferryError | None) -> None:
        if self.alive and isinstance(error, (PeerRestarted, WrongSession)):
            raise Violation(f"the living incarnation was evicted: {error}")


def _pause(error: KvferryError | None) -> float:
    return max(BACKOFF_FIRST, (error.retry_after or 0.0) if error else 0.0)


def group(first: int, blocks: Sequence[int]) -> pb.GroupBlocks:
    """Whole blocks of a request, from its block `first` on."""
    return pb.GroupBlocks(
        group="full",
        first_token=first * BLOCK,
        end_token=(first + len(blocks)) * BLOCK,
        run_starts=blocks,
        run_counts=[1] * len(blocks),
    )


def _end(step: pb.Publish, request: Request) -> None:
    """A request may stop where its prompt ends."""
    if step.last and step.groups and request.stops:
        (blocks,) = step.groups
        if blocks.end_token - BLOCK < request.length < blocks.end_token:
            blocks.end_token = request.length


def _error_of(response: pb.NotifyResponse) -> KvferryError | None:
    (result,) = response.results
    return from_notification_error(result.error) if result.WhichOneof("kind") == "error" else None
