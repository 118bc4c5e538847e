"""One home, one source engine at a time, two reader engines, and the rules that always hold between them."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from kvferry._control.backoff import CALL_TIMEOUT
from kvferry._wire.authority import SECRET_BYTES
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry._wire.reference import router_reference
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.router_keys import ROUTER_KEY_BYTES
from kvferry_server.domain.values import EngineRef, LeaseState
from tests.model.clocks import PartyClock, RealTime, Violation
from tests.model.confusion import Router
from tests.model.hinted import HintedShare
from tests.model.host import ADVERTISE, TIMES, Host
from tests.model.network import LIFE, Network, Pipe
from tests.model.prompts import OTHER, PLAIN, Errand, Said
from tests.model.readers import Reader, Share
from tests.model.source import ENGINE_ID, Memory, Offered, Routed, Source
from tests.support.parties import arrived
from tests.support.references import without_marks

BOUNDED = 30.0
"""Seconds, in a network without losses, within which every publication is released: the longest of hold, final and a
local release, after a restart of home and source, and some for the steps in which time passes here."""


class World:
    """All participants, and checks of R1 to R3 that have no better place."""

    def __init__(self, home_rate: float, source_rate: float, reader_rates: Sequence[float]) -> None:
        self.time = RealTime()
        self.network = Network(self.time)
        self.memory = Memory()
        self.home_clock = PartyClock(self.time, 1000.0, home_rate)
        self.source_clock = PartyClock(self.time, 50.0, source_rate)
        self.readers = [
            Reader(f"decode-{index}", PartyClock(self.time, 7000.0, rate)) for index, rate in enumerate(reader_rates)
        ]
        self.host: Host | None = Host(self.home_clock)
        self.router = Router()
        self.offered: list[Offered] = []
        self.routed: list[Routed] = []
        self.shares: list[Share] = []
        self._numbers = itertools.count(1)
        self.alters = True
        """Some routers change hints."""
        self._granted: dict[bytes, float] = {}
        self._revoked: dict[bytes, float] = {}
        self.source = self._new_source()

    # Calls of the participants.

    def publish(
        self,
        count: int,
        *,
        last: bool,
        expected_reads: int,
        routed: Routed | None = None,
        by_layers: bool = False,
        said: Said | None = None,
    ) -> None:
        published = self.source.publish(
            count,
            last=last,
            expected_reads=expected_reads,
            routed=routed,
            by_layers=by_layers,
            said=said or self.router.said(routed),
        )
        self.offered.append(published)

    def route(self) -> Routed:
        """A router makes a reference."""
        number = next(self._numbers)
        made = router_reference(ADVERTISE, ENGINE_ID, router_key=f"room-{number}", key=_secret(number)[:16])
        self.routed.append(Routed(made, self.router.request()))
        return self.routed[-1]

    def read(
        self,
        reader: Reader,
        offered: Offered | Routed,
        ranks: int,
        *,
        scheduled: bool,
        progressive: bool = False,
        errand: Errand | None = None,
    ) -> None:
        errand = errand or self.router.errand(offered)
        number = next(self._numbers)
        # One process for all ranks, or each rank by itself.
        groups = [tuple(range(ranks))] if scheduled else [(rank,) for rank in range(ranks)]
        for group in groups:
            kind = HintedShare if number % 2 else Share
            share = kind(
                reader,
                offered,
                f"read-{number}",
                ranks,
                group,
                self.network,
                self.memory,
                self._find,
                errand,
                progressive=progressive,
            )
            if isinstance(share, HintedShare):
                share.alters = self.alters and number % 7 == 0
            self.shares.append(share)
            share.start()

    def decline(self, offered: Offered | Routed) -> None:
        """A router gives up."""
        if isinstance(offered, Routed):
            offered.declined, reference = True, offered.reference
        else:
            offered.given_up, reference = True, offered.publication.reference
        decline = pb.Decline(reference=reference)
        request = pb.NotifyRequest(notifications=[pb.Notification(decline=decline)])

        def heard(host: Host) -> pb.NotifyResponse:
            answer = host.notify(request)
            # A home that has just started, and has heard of an impostor first, remembers the decline for the impostor
            # alone: the publication then takes as long as one that nobody declines.
            known = self.source.ref in host.home.records.engines
            if isinstance(offered, Routed) and known and answer.results[0].HasField("done"):
                host.declined.setdefault(offered.name, host.clock.now())
            return answer

        self.network.call(self, heard, lambda _: None)

    def restart_source(self) -> None:
        """The engine starts again over the same memory; the network keeps the last Watch of the old process."""
        for share in self.shares:
            share.orphaned = True
        old, self.source = self.source, self._new_source(self.source)
        late = old.late_watch()
        self.network.open(self, late, Pipe[pb.WatchResponse](lambda _: None, lambda _: None, listening=False))
        self.network.packets[-1].first = False

    def stop_source(self) -> None:
        """As `restart_source`, in order: the old process first retires. The network may delay that message, too."""
        self.source.retire(self)
        self.restart_source()

    def stop_home(self) -> None:
        self.host = None
        self.network.home_gone()

    def start_home(self) -> None:
        self.host = Host(self.home_clock)

    def drain(self, *, stopping: bool) -> None:
        """The home takes no new work; with `stopping`, its node server ends Watches without waiting for leases."""
        if self.host is not None:
            self.host.home.drain()
            if stopping:
                self.host.home.end_watches()
        self.settle()

    def kill(self, reader: Reader) -> None:
        for share in self.shares:
            if share.reader is reader and not share.over:
                share.die()

    def pause(self, reader: Reader, seconds: float) -> None:
        """A virtual machine is stopped, and its clock with it."""
        reader.fell_behind = True
        self.pass_time(seconds)
        reader.clock.leap(-seconds)

    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.network.expire()
        self.settle()

    def settle(self) -> None:
        """Fire timers, poll the source, and check the rules."""
        if self.host is not None:
            self.host.tick()
            self.host.pump(self.network.pipes)
        self.source.poll()
        self.check_home()
        self.check_waiting()
        self.check_beliefs()

    # Progress without events.

    def work(self) -> bool:
        """Let every participant take its next step. Returns whether any did."""
        worked = self.source.step()
        for share in self.shares:
            worked |= share.step()
        return worked

    def flow(self, *, repeated: bool = False, rounds: int = 40) -> None:
        """Deliver all messages but stragglers, and those that follow from them.

        Args:
            repeated: another copy of each request straggles.
            rounds: the most rounds of deliveries.
        """
        for _ in range(rounds):
            moved = self.work()
            for packet in list(self.network.packets):
                if packet in self.network.packets and not packet.straggles:
                    self.network.arrive(packet, self.host, again=repeated)
                    moved = True
            for pipe in list(self.network.pipes):
                while self.network.receive(pipe):
                    moved = True
                if not pipe.listening:
                    self.network.notice(pipe)
            if not moved:
                break
        self.settle()

    def answer_late(self, seconds: float) -> None:
        """Readers renew; the home gets all requests at once, and its answers take `seconds`."""
        for share in self.shares:
            share.renew()
        for packet in [packet for packet in self.network.packets if packet.answer is None]:
            self.network.arrive(packet, self.host)
        self.pass_time(seconds)
        for packet in [packet for packet in self.network.packets if packet.answer is not None]:
            self.network.arrive(packet, self.host)
        self.settle()

    # Rules that always hold.

    def before_write(self, offered: Offered | None, blocks: Sequence[int]) -> None:
        """R2: no reader that believes in a live lease reads the blocks that are written now."""
        for share in self.shares:
            if share.reader.fell_behind or not share.relies:
                continue
            offers = share.offered is offered and not share.errand.invented
            if offers or share.blocks.intersection(blocks):
                raise Violation(f"R2: blocks {blocks} change under a live lease of {share.reader.engine.engine_id}")

    def check_home(self) -> None:
        """Check the home's records: nothing is revived, and no end is put off."""
        host = self.host
        if host is None:
            return
        records, now = host.home.records, host.clock.now()
        over = host.withdrawn | {(one.source.ref, one.number) for one in self.offered if one.free or one.aborted}
        for publication in arrived(records):
            key = (publication.source, publication.number)
            if publication.grantable and key in over and not records.engines[publication.source].recovering:
                raise Violation(f"{publication} was released or aborted, and is offered again")
            self._check_declined(host, publication, now)
            for lease in publication.leases:
                if lease.expires > publication.final_at:
                    raise Violation(
                        f"R3: a lease on {publication}, which is released at {publication.final_at}, lives on"
                    )
                extended = max(self._granted.setdefault(lease.lease_id, now), host.renewed_at.get(lease.lease_id, 0))
                if lease.expires > extended + TIMES.ttl:
                    raise Violation(f"R3: a lease on {publication}, last renewed at {extended}, was extended")
                revoked = self._revoked.setdefault(lease.lease_id, now) if lease.revoked else now
                if lease.expires > revoked + TIMES.max_ttl:
                    raise Violation(f"R3: a lease on {publication}, revoked at {revoked}, lives until {lease.expires}")

    def check_waiting(self) -> None:
        """R5: no read waits under a router's key for a source that is gone."""
        host = self.host
        if host is None:
            return
        living = {engine.ref for engine in host.home.engines.all_engines() if not engine.dead}
        for source in host.home.records.engines:
            for waiting in host.home.records.waiting(source):
                if not living & set(waiting.sources):
                    raise Violation(f"R5: a read of {source} waits for a source that is gone")

    @staticmethod
    def _check_declined(host: Host, publication: PublicationRecord, now: float) -> None:
        """A decline that comes before its publication is remembered for `max_wait`."""
        name = publication.router_key.name if publication.router_key is not None else ""
        since = host.declined.get(name)
        if publication.grantable and since is not None and now < since + TIMES.max_wait:
            raise Violation(f"{publication} is offered though its router has declined it")

    def check_beliefs(self) -> None:
        """R1: a reader that believes in a live lease has one, if its home lives."""
        if self.host is None:
            return
        held = {lease.lease_id: lease for lease in self.host.home.records.leases()}
        for share in self.shares:
            if share.lease is None or share.reader.fell_behind or not share.relies:
                continue
            lease = held.get(share.lease.lease_id)
            if lease is not None and not lease.live:
                raise Violation(f"R1: {share.read_id} believes in a lease that is {lease.state.name}")

    def check_bounded(self) -> None:
        """R3: without readers and losses, every publication is released, once, in bounded time."""
        for share in self.shares:
            if not share.over:
                share.die()
        if self.host is None or self.host.home.draining:
            self.stop_home()
            self.start_home()
        until = self.time.now + BOUNDED
        source = self.source
        while source.offers.unreleased() or source.sendings:
            if self.time.now > until:
                numbers = [held.number for held in source.offers.unreleased()]
                raise Violation(f"R3: publications {numbers} are not released after {BOUNDED} s")
            self.flow()
            self.pass_time(0.75)
        for offered in self.offered:
            if offered.source is source and not offered.free:
                raise Violation(f"R3: publication {offered.number} was never released")
        self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        """Publications and reads are forgotten, and do not count against the source's memory any more."""
        for _ in range(3):
            # Until the last acknowledgement was repeated, and the last outcome is kept no longer.
            self.flow()
            self.pass_time(TIMES.max_ttl)
        self.flow()
        host, ref = cast(Host, self.host), self.source.ref
        home = host.home
        publications = home.records.engines.get(ref)
        left = None if publications is None else list(publications.publications)
        if publications is None or left:
            raise Violation(f"R3: the home still has publications {left} of {ref}")
        engine = home.engines.find(ref)
        own = engine.feed_bytes + sum(rank.size for rank in engine.ranks.values())
        keys = publications.router_keys
        own += ROUTER_KEY_BYTES * len(keys._past)
        if home.memory.held(ref) != own:
            raise Violation(f"the home counts {home.memory.held(ref)} bytes for {ref}, which has {own}")
        live = Counter(lease.state for lease in home.records.leases() if lease.live)
        for state in (LeaseState.WAITING, LeaseState.READING):
            if home.journal.live_leases[state] != live[state]:
                raise Violation(f"the home counts {home.journal.live_leases[state]} leases as {state.name}: {live}")

    def check_served(self, meanwhile: Callable[[], None], *, routes: bool = False) -> None:
        """R13: without losses, a request is published and read in bounded time, whatever a liar sends.

        Args:
            meanwhile: sends the liar's messages, each time.
            routes: a router makes the references.
        """
        self.alters = False
        if self.host is None or self.host.home.draining:
            self.stop_home()
            self.start_home()
        # Delayed messages of the participants themselves are no lies.
        self.flow()
        self.pass_time(CALL_TIMEOUT + LIFE)
        # A source whose Watch the network had cut opens it again.
        self.pass_time(0.1)
        self.flow()
        until = self.time.now + 2 * BOUNDED
        reader, served = self.readers[0], 0
        while self.time.now < until and served < 2:
            self.flow()
            meanwhile()
            if not self.source.can_publish:
                self.pass_time(0.75)
                continue
            routed = self.route() if routes else None
            if routed is not None:
                # The reader asks first.
                self.read(reader, routed, 1, scheduled=True)
                self.flow()
                meanwhile()
                if not self.source.can_publish:
                    continue
            self.publish(1, last=True, expected_reads=1, routed=routed)
            self.flow()
            meanwhile()
            if routed is None:
                self.read(reader, self.offered[-1], 1, scheduled=True)
            (share,) = self.shares[-1:]
            while not share.over and self.time.now < until:
                self.flow()
                meanwhile()
                while share.copying():
                    share.copy(0)
                self.flow()
                self.pass_time(0.1)
            if not share.good:
                raise Violation(f"R13: a read beside a liar is lost: {share.read_id}")
            served += 1
        if served < 2:
            raise Violation("R13: beside a liar, nothing can be published any more")

    def check_right_reader(self) -> None:
        """R14, R3: without losses, a publication that the wrong reader refused reaches the right reader."""
        self.alters = False
        if self.host is None or self.host.home.draining:
            self.stop_home()
            self.start_home()
        self.flow()
        self.pass_time(CALL_TIMEOUT + LIFE)
        since = self.time.now
        until = since + 2 * BOUNDED
        # Until the source has seen a home that has just started.
        while self.time.now < until and not (self.source.can_publish and self.time.now > since + 3):
            self.flow()
            self.pass_time(0.75)
        self.publish(1, last=True, expected_reads=1, said=Said(PLAIN))
        offered = self.offered[-1]
        self.flow()
        wrong, right = self.readers
        for reader, request in ((wrong, OTHER), (wrong, OTHER), (right, PLAIN)):
            # The marks have to come from the home: the reference has none.
            errand = Errand(request, reference=without_marks(offered.publication.reference))
            self.read(reader, offered, 1, scheduled=True, errand=errand)
            share = self.shares[-1]
            while not share.over and self.time.now < until:
                self.flow()
                while share.copying():
                    share.copy(0)
                self.flow()
                self.pass_time(0.1)
            if share.refused != (request is OTHER) or share.good == share.refused:
                raise Violation(f"R14: the read of {request} ends as refused {share.refused}, good {share.good}")
        while not offered.free and self.time.now < until:
            self.flow()
            self.pass_time(0.1)
        if offered.outcome is not ReleaseOutcome.READ:
            raise Violation(f"R3: publication {offered.number} ended as {offered.outcome}, its reader has read it")

    def close(self) -> None:
        self.network.close()

    def _find(self, accepted: pb.Accepted) -> Offered:
        """Return the publication that an accepted read is of, by the home's answer."""
        ref = EngineRef(accepted.source.engine_id, accepted.source.incarnation)
        for offered in self.offered:
            if offered.source.ref == ref and offered.number == accepted.publication:
                return offered
        raise Violation(f"R1: a read was given publication {accepted.publication} of {ref}, which nobody has published")

    def _new_source(self, before: Source | None = None) -> Source:
        if before is not None:
            before.end()
        secret = _secret(next(self._numbers))[:SECRET_BYTES]
        return Source(secret, self.source_clock, self.network, self.memory, self.before_write)


def _secret(number: int) -> bytes:
    """32 bytes that a liar, who tries plain numbers, does not guess."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()
