"""The state machine with a liar in it."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.model.clocks import RATES
from tests.model.liar import LIES, Liar
from tests.model.machine import PICK, Machine

MANY = st.lists(st.sampled_from(LIES), min_size=1, max_size=8)

ABOUT_A_READ = ("listing", "reader", "decline") * 2


class LyingMachine(Machine):
    """A `Machine` in which a peer lies between any two rules."""

    liar: Liar
    routes = False
    """Whether the requests that must be served beside a liar have references that a router made."""

    @initialize(
        home=st.sampled_from(RATES),
        source=st.sampled_from(RATES),
        readers=st.tuples(st.sampled_from(RATES), st.sampled_from(RATES)),
    )
    def begin(self, home: float, source: float, readers: tuple[float, float]) -> None:
        super().begin(home, source, readers)
        self.liar, self.turns = Liar(self.world), random.Random(0)

    @rule(lies=MANY, pick=PICK)
    def lies_are_told(self, lies: list[str], pick: int) -> None:
        self._lie(lies, pick)

    @precondition(lambda self: self.world.source.can_publish)
    @rule(lies=MANY, pick=PICK, last=st.booleans(), calm=st.booleans())
    def lies_are_told_of_a_read(self, lies: list[str], pick: int, last: bool, calm: bool) -> None:
        world = self.world
        world.publish(1, last=last, expected_reads=1)
        for reader in world.readers:
            world.read(reader, world.offered[-1], 1, scheduled=True)
        world.flow()
        # Two leases take several pages, so that there are tokens to look into.
        self._lie([*lies, *ABOUT_A_READ], pick)
        world.flow()
        self._copy_all()
        self._calm(calm)

    @rule(lies=MANY, pick=PICK)
    def lies_are_told_to_a_home_that_has_just_started(self, lies: list[str], pick: int) -> None:
        """The engines from before the restart are back within an engine_ttl."""
        world = self.world
        world.stop_home()
        world.start_home()
        self.liar.squats = True
        self._lie(lies, pick)
        for _ in range(4):
            world.flow()
            world.pass_time(0.05)
        self.liar.squats = False

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                told = (*LIES, "route", "route") if self.routes else LIES
                self.world.check_served(
                    lambda: self._lie([self.turns.choice(told)], self.turns.randrange(1 << 16)), routes=self.routes
                )
            except BaseException:
                self.world.close()
                raise
        super().teardown()

    def _lie(self, lies: list[str], pick: int) -> None:
        turns = random.Random(pick)
        for what in lies:
            self.liar.tell(what, turns)
