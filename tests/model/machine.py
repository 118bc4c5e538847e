"""The state machine: events in a `World`, in any order.

All rules are drawn equally often, so a rule groups events: most of them have to lead somewhere for the disasters to hit
something.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvferry._control.publications import LOCAL_RELEASE_MARGIN, LOCAL_RELEASE_SHARE
from tests.model.clocks import RATES
from tests.model.hinted import HintedShare
from tests.model.host import TIMES
from tests.model.network import Packet
from tests.model.readers import Reader, Share
from tests.model.source import Offered
from tests.model.world import World

PICK = st.integers(min_value=0, max_value=1 << 16)
"""Picks one of the present objects."""

SECONDS = st.sampled_from((0.02, 0.1, 0.3, 0.3, 0.7, 1.1, 1.1, 1.5, 2.1, 2.7, 3.2, 4.2))
LONG = st.sampled_from((0.3, 1.1, 2.1, 2.7, 6.0, 13.0))

BEGIN = st.sampled_from(("all", "all", "all", "blocks", "a layer"))
"""Content of a request's first step: all blocks, some, or a layer of some."""

Between = Literal[
    "nothing", "home restarts", "home is away", "told again", "aborted", "source restarts", "late", "late and away"
]
Trouble = Literal["lost", "repeated", "overtaken", "timeout", "heard", "cut", "noticed"]
Disaster = Literal[
    "home restarts",
    "home is away",
    "home drains",
    "source restarts",
    "source stops",
    "reader dies",
    "reader pauses",
    "clock leaps",
]


class Machine(RuleBasedStateMachine):
    """Every rule is an event in a fleet on a bad day; with `calm`, no more goes wrong for a moment afterwards."""

    world: World

    @initialize(
        home=st.sampled_from(RATES),
        source=st.sampled_from(RATES),
        readers=st.tuples(st.sampled_from(RATES), st.sampled_from(RATES)),
    )
    def begin(self, home: float, source: float, readers: tuple[float, float]) -> None:
        self.world = World(home, source, readers)
        self.world.flow()
        self.world.pass_time(4.5)  # A home that has just started lets no source use memory that may be leased.

    @rule(repeated=st.booleans())
    def all_is_well(self, repeated: bool) -> None:
        self.world.flow(repeated=repeated)

    @rule(seconds=SECONDS, calm=st.booleans())
    def time_passes(self, seconds: float, calm: bool) -> None:
        self.world.pass_time(seconds)
        self._calm(calm)

    # The source.

    @precondition(lambda self: self.world.source.can_publish)
    @rule(count=st.integers(1, 2), what=BEGIN, expected=st.integers(1, 2), calm=PICK)
    def publish(self, count: int, what: str, expected: int, calm: int) -> None:
        self.world.publish(count, last=what == "all", expected_reads=expected, by_layers=what == "a layer")
        self._calm(bool(calm % 4))

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1), ranks=st.integers(1, 3), scheduled=st.booleans(), repeated=st.booleans())
    def publish_and_read(self, reader: int, ranks: int, scheduled: bool, repeated: bool) -> None:
        self.world.publish(1, last=True, expected_reads=1)
        self.world.read(self.world.readers[reader], self.world.offered[-1], ranks, scheduled=scheduled)
        self.world.flow(repeated=repeated)

    @precondition(lambda self: self._extensible())
    @rule(pick=PICK, what=st.sampled_from(("all", "all", "blocks", "a layer", "a layer")), calm=st.booleans())
    def publish_more(self, pick: int, what: str, calm: bool) -> None:
        found = self._extensible()
        offered = found[pick % len(found)]
        self.world.source.publish_more(offered, 1, last=what == "all", by_layers=what == "a layer")
        self._calm(calm)

    @precondition(lambda self: self._held())
    @rule(what=st.sampled_from(("abort", "decline", "give up")), pick=PICK, calm=st.booleans())
    def think_better_of_it(self, what: str, pick: int, calm: bool) -> None:
        found, sendings = self._held(), self.world.source.sendings
        if what == "decline":
            self.world.decline(self.world.offered[pick % len(self.world.offered)])
        elif what == "abort":
            self.world.source.abort(found[pick % len(found)])
        elif sendings:
            self.world.source.disown(sendings[pick % len(sendings)])
        self._calm(calm)

    # The readers.

    @precondition(lambda self: self.world.offered)
    @rule(reader=st.integers(0, 1), pick=PICK, ranks=st.integers(1, 3), scheduled=st.booleans(), calm=PICK)
    def read(self, reader: int, pick: int, ranks: int, scheduled: bool, calm: int) -> None:
        offered = self.world.offered[-3:]
        self.world.read(
            self.world.readers[reader],
            offered[pick % len(offered)],
            ranks,
            scheduled=scheduled,
            progressive=calm % 8 > 3,
        )
        self._calm(bool(calm % 4))

    @precondition(lambda self: self._hinted())
    @rule(pick=PICK, calm=st.booleans())
    def a_long_read_is_leased(self, pick: int, calm: bool) -> None:
        found = self._hinted()
        found[pick % len(found)].lease_it()
        self._calm(calm)

    @precondition(lambda self: self._copying())
    @rule(pick=PICK, count=st.integers(1, 3), calm=st.booleans())
    def copy(self, pick: int, count: int, calm: bool) -> None:
        for _ in range(count):
            if copying := self._copying():
                share, rank = copying[pick % len(copying)]
                share.copy(rank)
        self._calm(calm)

    @precondition(lambda self: self._copying())
    @rule(renew=st.booleans(), calm=st.booleans())
    def copy_all(self, renew: bool, calm: bool) -> None:
        if renew:
            self._renew()
        self._copy_all()
        self._calm(calm)

    @precondition(lambda self: any(share.relies for share in self.world.shares))
    @rule(what=st.sampled_from(("renew", "renew", "renew", "cancel", "stop")), pick=PICK, calm=st.booleans())
    def renew_or_stop(self, what: str, pick: int, calm: bool) -> None:
        if what == "renew":
            self._renew()
        else:
            found = [share for share in self.world.shares if share.relies]
            found[pick % len(found)].give_up(cancel=what == "cancel")
        self._calm(calm)

    # The network.

    @precondition(lambda self: self.world.network.packets)
    @rule(pick=PICK)
    def packet_arrives(self, pick: int) -> None:
        self.world.network.arrive(self._packet(pick), self.world.host)
        self.world.settle()

    @rule(seconds=SECONDS, calm=PICK)
    def answers_come_late(self, seconds: float, calm: int) -> None:
        self.world.answer_late(seconds)
        self._calm(calm % 4 == 0)

    @rule(pick=PICK, seconds=SECONDS)
    def stragglers_arrive(self, pick: int, seconds: float) -> None:
        self.world.pass_time(seconds)
        self._stragglers_arrive(but=pick % 3)

    @rule(what=st.sampled_from(Trouble.__args__), pick=PICK)  # type: ignore[attr-defined]
    def network_misbehaves(self, what: Trouble, pick: int) -> None:
        network = self.world.network
        if network.packets and what in ("lost", "repeated", "overtaken"):
            packet = self._packet(pick)
            if what == "lost":
                network.lose(packet)
            else:
                network.arrive(packet, self.world.host, again=what == "repeated")
        elif network.calls and what == "timeout":
            network.give_up(network.calls[pick % len(network.calls)])
        elif network.pipes:
            pipe = network.pipes[pick % len(network.pipes)]
            if what == "heard":
                network.receive(pipe)
            elif what == "cut":
                network.cut(pipe)
            else:
                network.notice(pipe)
        self.world.settle()

    # Disasters.

    @rule(what=st.sampled_from(Disaster.__args__), reader=st.integers(0, 1), seconds=LONG, calm=PICK)  # type: ignore[attr-defined]
    def disaster(self, what: Disaster, reader: int, seconds: float, calm: int) -> None:
        world, victim = self.world, self.world.readers[reader]
        if what == "source restarts":
            world.restart_source()
        elif what == "source stops":
            world.stop_source()
        elif what == "reader dies":
            world.kill(victim)
        elif what == "reader pauses":
            # Only ever the second reader: the first is checked by its own clock.
            world.pause(world.readers[1], seconds)
        elif what == "clock leaps":
            victim.clock.leap(seconds)
        elif what == "home drains" and calm % 2:
            world.drain(stopping=calm % 4 == 3)
        else:
            world.stop_home()
            world.pass_time(seconds if what == "home is away" else 0.0)
            world.start_home()
        self._calm(calm % 4 > 0)

    @precondition(lambda self: self.world.source.can_publish)
    @rule(seconds=st.sampled_from((6.0, 13.0)))
    def a_reader_is_paused_for_long(self, seconds: float) -> None:
        """The pause lasts until the lease has ended at the home, and all blocks of the read were overwritten."""
        world = self.world
        self._publish_and_read(world.readers[1], 1, scheduled=True)
        world.pause(world.readers[1], seconds)
        world.flow()
        self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1), ranks=st.integers(2, 3), copy=st.booleans(), late=st.booleans())
    def a_read_is_heard_twice(self, reader: int, ranks: int, copy: bool, late: bool) -> None:
        """All messages of its participants are repeated, while one rank still copies, or at the end."""
        world = self.world
        shares = self._publish_and_read(world.readers[reader], ranks, scheduled=False, repeated=True)
        if not late:
            world.pass_time(0.1)
            self._stragglers_arrive()
        for share in shares[1:]:
            self._copy_share(share)
        world.flow(repeated=True)
        if not late:
            self._stragglers_arrive()
        if copy:
            self._copy_all()
        world.flow()
        self._stragglers_arrive()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(
        reader=st.integers(0, 1),
        end=st.sampled_from(
            ("declined", "aborted", "read by another", "unread", "its source restarts", "its source stops")
        ),
        home_restarts=st.booleans(),
        copy=st.booleans(),
    )
    def a_publication_ends_under_a_read(self, reader: int, end: str, home_restarts: bool, copy: bool) -> None:
        """At a home that knows of the read, or at a restarted home that has the publication again, before the reader
        notices."""
        world = self.world
        self._publish_and_read(world.readers[reader], 1, scheduled=True)
        offered = world.offered[-1]
        if home_restarts:
            world.stop_home()
            world.start_home()
            world.flow()
            # The source notices, and opens its Watch again; the reader's renewal is not due.
            world.pass_time(0.1)
            world.flow()
        if end == "declined":
            world.decline(offered)
        elif end == "aborted":
            world.source.abort(offered)
        elif end == "read by another":
            world.read(world.readers[1 - reader], offered, 1, scheduled=True)
            world.flow()
            self._copy_share(world.shares[-1])
        elif end == "unread":
            world.pass_time(TIMES.hold + 0.05)
        else:
            (world.restart_source if end == "its source restarts" else world.stop_source)()
            for _ in range(3):
                world.flow()
                world.pass_time(0.4)
        world.flow()
        if copy:
            self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1), copy=st.booleans())
    def a_reader_renews_until_the_final_deadline(self, reader: int, copy: bool) -> None:
        """It copies nothing before its publication is released in any case."""
        world = self.world
        self._publish_and_read(world.readers[reader], 1, scheduled=True)
        for _ in range(round(TIMES.final)):
            world.pass_time(0.95)
            world.flow()
        if copy:
            self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(
        reader=st.integers(0, 1),
        ranks=st.integers(1, 2),
        by_layers=st.booleans(),
        between=st.sampled_from(Between.__args__),  # type: ignore[attr-defined]
        after=st.integers(0, 2),
        seconds=LONG,
        copy=st.booleans(),
    )
    def a_read_moves_step_by_step(
        self, reader: int, ranks: int, by_layers: bool, between: Between, after: int, seconds: float, copy: bool
    ) -> None:
        """A disaster comes between two of the steps."""
        self._move_step_by_step(reader, ranks, by_layers, between, after, seconds, copy)

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1), after=st.integers(1, 2), copy=st.booleans())
    def a_step_overtakes_the_snapshot(self, reader: int, after: int, copy: bool) -> None:
        """The home has received half of the snapshot."""
        self._move_step_by_step(reader, 1, True, "told again", after, 0.0, copy)

    def _move_step_by_step(
        self, reader: int, ranks: int, by_layers: bool, between: Between, after: int, seconds: float, copy: bool
    ) -> None:
        world, source = self.world, self.world.source
        world.publish(1, last=False, expected_reads=1, by_layers=by_layers)
        offered = world.offered[-1]
        world.read(world.readers[reader], offered, ranks, scheduled=True, progressive=True)
        world.flow()
        steps = [("a layer", 0), ("blocks", 0), ("a layer", 1), ("all", 0)] if by_layers else [("all", 1)]
        for index, (what, count) in enumerate(steps):
            if copy or between == "late and away":
                self._copy_all()
            if index == after:
                self._come_between(between, offered, seconds)
            if source.alive and offered in self._extensible():
                source.publish_more(offered, count, last=what == "all", by_layers=what == "a layer")
                if between == "told again" and index == after:
                    # The next step overtakes the snapshot, of which the home has received half.
                    world.network.arrive(world.network.packets[-1], world.host)
            world.flow()
        if between == "late and away":
            world.stop_home()
        if between == "late":
            world.pass_time(seconds)
        elif between == "late and away":
            # Until the lease has ended. The home that starts then has no record of the lease.
            world.pass_time(max(seconds, TIMES.ttl + 0.1))
            world.start_home()
        self._copy_all()
        world.flow()

    def _come_between(self, between: Between, offered: Offered, seconds: float) -> None:
        world = self.world
        if between in ("home restarts", "home is away", "told again"):
            world.stop_home()
            world.pass_time(seconds if between == "home is away" else 0.0)
            world.start_home()
        if between == "told again":
            world.flow(rounds=1)
            # The source notices, and opens its Watch again.
            world.pass_time(0.1)
            for _ in range(12):
                if world.host and any(step.publication == offered.number for step in world.host.published):
                    break
                world.flow(rounds=1)
            return
        if between == "aborted":
            world.source.abort(offered)
        elif between == "source restarts":
            world.restart_source()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1), seconds=st.sampled_from((0.3, 0.7, 1.1)))
    def a_renewal_is_answered_late(self, reader: int, seconds: float) -> None:
        """No other renewal is sent until the lease has ended."""
        world = self.world
        self._publish_and_read(world.readers[reader], 1, scheduled=True)
        world.answer_late(seconds)
        world.pass_time(TIMES.ttl - seconds + 0.1)
        self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(reader=st.integers(0, 1))
    def the_home_comes_back_when_it_is_almost_given_up(self, reader: int) -> None:
        """Its source would soon have released it locally; the home takes it as a new publication, and grants leases."""
        world = self.world
        world.publish(1, last=True, expected_reads=1)
        world.flow()
        world.stop_home()
        world.flow()
        world.pass_time(TIMES.final * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN - 0.5)
        world.start_home()
        for _ in range(2):
            world.flow()
            world.pass_time(0.1)
        world.read(world.readers[reader], world.offered[-1], 1, scheduled=True)
        world.flow()
        world.pass_time(0.7)
        self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(
        reader=st.integers(0, 1),
        heard=st.booleans(),
        seconds=st.sampled_from((6.0, 13.0)),
        then=st.sampled_from(("kept", "kept", "aborted", "given up")),
    )
    def a_request_is_published_in_an_outage(self, reader: int, heard: bool, seconds: float, then: str) -> None:
        """The outage lasts longer than a call. The home may have received the first attempt; readers wait for the next
        home, which gets the publication in a snapshot, by the step itself, or both."""
        world, source = self.world, self.world.source
        if not heard:
            world.stop_home()
        world.publish(1, last=True, expected_reads=1)
        if heard:
            world.network.arrive(world.network.packets[-1], world.host)
            world.stop_home()
        world.pass_time(seconds)
        world.flow()
        if then == "aborted":
            source.abort(world.offered[-1])
        elif then == "given up" and source.sendings:
            source.disown(source.sendings[0])
        world.start_home()
        world.read(world.readers[reader], world.offered[-1], 1, scheduled=True)
        for _ in range(3):
            world.flow()
            world.pass_time(0.4)
        self._copy_all()
        world.flow()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.check_bounded()
            finally:
                self.world.close()

    # Present objects.

    def _calm(self, calm: bool) -> None:
        if calm:
            self.world.flow()

    def _packet(self, pick: int) -> Packet:
        packets = self.world.network.packets
        return packets[pick % len(packets)]

    def _renew(self) -> None:
        for share in self.world.shares:
            share.renew()

    def _copy_all(self) -> None:
        while copying := self._copying():
            share, rank = copying[0]
            share.copy(rank)

    def _copy_share(self, share: Share) -> None:
        while copying := share.copying():
            share.copy(copying[0])

    def _publish_and_read(self, reader: Reader, ranks: int, *, scheduled: bool, repeated: bool = False) -> list[Share]:
        world = self.world
        world.publish(1, last=True, expected_reads=1)
        before = len(world.shares)
        world.read(reader, world.offered[-1], ranks, scheduled=scheduled)
        world.flow(repeated=repeated)
        return world.shares[before:]

    def _stragglers_arrive(self, but: int = 0) -> None:
        network = self.world.network
        for packet in [packet for packet in network.packets if packet.straggles][but:]:
            network.arrive(packet, self.world.host)
        self.world.settle()

    def _hinted(self) -> list[HintedShare]:
        return [share for share in self.world.shares if isinstance(share, HintedShare) and not share.over]

    def _copying(self) -> list[tuple[Share, int]]:
        return [(share, rank) for share in self.world.shares for rank in share.copying()]

    def _held(self) -> list[Offered]:
        source = self.world.source
        return [offered for offered in self.world.offered if offered.source is source and not offered.free]

    def _extensible(self) -> list[Offered]:
        source = self.world.source
        if not source.free or not source.ready:
            return []
        sending = {sending.offered for sending in source.sendings}
        return [offered for offered in self._held() if not offered.complete and offered not in sending]
