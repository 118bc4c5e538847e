"""The state machines with a router that makes the references itself, and sends them to source and readers at once."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.model.lying import MANY, LyingMachine
from tests.model.machine import BEGIN, PICK, SECONDS, Machine
from tests.model.source import Routed

END = st.sampled_from(("published", "published", "published late", "declined", "declined first", "source restarts"))


class RoutedMachine(Machine):
    """A `Machine` in which routers also make references before their publications, whose readers wait."""

    @precondition(lambda self: self.world.source.can_publish)
    @rule(
        ranks=st.integers(1, 3),
        both=st.booleans(),
        scheduled=st.booleans(),
        end=END,
        seconds=SECONDS,
        home_restarts=st.booleans(),
        repeated=st.booleans(),
        calm=st.booleans(),
    )
    def a_router_asks_both_at_once(
        self,
        ranks: int,
        both: bool,
        scheduled: bool,
        end: str,
        seconds: float,
        home_restarts: bool,
        repeated: bool,
        calm: bool,
    ) -> None:
        """The readers are there first, and anything may happen before the source has published."""
        world, routed = self.world, self.world.route()
        for reader in world.readers[: 1 + both]:
            world.read(reader, routed, ranks, scheduled=scheduled)
        world.flow(repeated=repeated)
        if end == "source restarts":
            world.restart_source()
            for _ in range(3):
                world.flow()
                world.pass_time(0.4)
        if home_restarts:
            world.stop_home()
            world.start_home()
            world.flow()
        if end == "declined first":
            world.decline(routed)
            world.flow(repeated=repeated)
        if end == "published late":
            world.pass_time(seconds)
        if world.source.can_publish:
            world.publish(1, last=True, expected_reads=1 + both, routed=routed)
        world.flow(repeated=repeated)
        if end == "declined":
            world.decline(routed)
        self._copy_all()
        self._calm(calm)

    @precondition(lambda self: self.world.routed)
    @rule(
        what=st.sampled_from(("read", "publish", "publish", "decline")),
        begin=BEGIN,
        reader=st.integers(0, 1),
        pick=PICK,
        calm=PICK,
    )
    def a_routers_reference_is_used(self, what: str, begin: str, reader: int, pick: int, calm: int) -> None:
        """By any bearer, at any time; but for one publication only."""
        world = self.world
        routed = self._routed(pick)
        used = any(offered.routed is routed for offered in world.offered)
        if what == "decline":
            world.decline(routed)
        elif what == "read":
            world.read(world.readers[reader], routed, 1, scheduled=True, progressive=calm % 8 > 3)
        elif world.source.can_publish and not used:
            world.publish(1, last=begin == "all", expected_reads=1, routed=routed, by_layers=begin == "a layer")
        self._calm(bool(calm % 4))

    def _routed(self, pick: int) -> Routed:
        recent = self.world.routed[-3:]
        return recent[pick % len(recent)]


class RoutedLyingMachine(LyingMachine, RoutedMachine):
    """A `RoutedMachine` in which a peer lies between any two rules."""

    routes = True

    @precondition(lambda self: self.world.source.can_publish)
    @rule(lies=MANY, pick=PICK, first=st.booleans(), squats=st.booleans())
    def lies_are_told_of_a_wait(self, lies: list[str], pick: int, first: bool, squats: bool) -> None:
        world = self.world
        if squats:
            # A home that has just started cannot tell which engine owns the name.
            world.stop_home()
            world.start_home()
            world.flow()
            self.liar.squats = True
            self._lie(["squat"], pick)
            self.liar.squats = False
            for _ in range(4):
                world.flow()
                world.pass_time(0.05)
        routed = world.route()
        world.read(world.readers[0], routed, 1, scheduled=True)
        world.flow()
        self._lie([*lies, "decline", "route", "decline", "route"], pick)
        if world.source.can_publish:
            world.publish(1, last=True, expected_reads=1, routed=routed)
        world.flow()
        self._lie(["route", "decline", *lies] if first else lies, pick + 1)
        world.flow()
        self._copy_all()
        world.flow()
