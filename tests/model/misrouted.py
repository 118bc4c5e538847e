"""The state machine with a router that confuses requests: it swaps, repeats and invents references (R14)."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvferry._control.right_prompt import PromptCheck
from kvferry.errors import RouterKeyUsed
from tests.model.clocks import RATES
from tests.model.confusion import SAYS, TAKES, ConfusedRouter, request_of
from tests.model.machine import PICK, SECONDS
from tests.model.prompts import REQUESTS, Errand, Said
from tests.model.routed import RoutedMachine
from tests.support.references import without_marks

CHECKS = st.sampled_from((PromptCheck.COMPARE, PromptCheck.REQUIRE))


class MisroutedMachine(RoutedMachine):
    """A `RoutedMachine` with requests of every kind, in which reads may get another request's reference."""

    @initialize(
        home=st.sampled_from(RATES),
        source=st.sampled_from(RATES),
        readers=st.tuples(st.sampled_from(RATES), st.sampled_from(RATES)),
        seed=PICK,
        checks=st.tuples(CHECKS, CHECKS),
    )
    def begin(
        self,
        home: float,
        source: float,
        readers: tuple[float, float],
        seed: int,
        checks: tuple[PromptCheck, PromptCheck],
    ) -> None:
        super().begin(home, source, readers)
        self.world.router, self.turns = ConfusedRouter(seed), random.Random(seed)
        for reader, check in zip(self.world.readers, checks, strict=True):
            reader.prompt_check = check

    @precondition(lambda self: self.world.source.can_publish)
    @rule(
        routed=st.booleans(),
        begin=st.sampled_from(("all", "all", "blocks", "blocks", "a layer")),
        ranks=st.integers(1, 2),
        scheduled=st.booleans(),
        progressive=st.booleans(),
        between=st.sampled_from(("nothing", "nothing", "home restarts", "home restarts", "source restarts")),
        seconds=SECONDS,
        copy=st.booleans(),
    )
    def two_requests_are_confused(
        self,
        routed: bool,
        begin: str,
        ranks: int,
        scheduled: bool,
        progressive: bool,
        between: str,
        seconds: float,
        copy: bool,
    ) -> None:
        """Each reader gets the other's reference, and then its own."""
        world, before = self.world, len(self.world.offered)
        references = [world.route() for _ in world.readers] if routed else []
        for reader, asked, wanted in zip(world.readers, references, references[::-1], strict=False):
            # The reader asks before the source has published.
            world.read(reader, asked, ranks, scheduled=scheduled, errand=Errand(wanted.request))
        world.flow()
        for index in range(2):
            if world.source.can_publish:
                reference = references[index] if routed else None
                world.publish(1, last=begin == "all", expected_reads=1, routed=reference, by_layers=begin == "a layer")
            world.flow()
        offered = world.offered[before:]
        for reader, given, other in zip(world.readers, offered, offered[::-1], strict=False):
            errand = Errand(request_of(other), late=copy)
            world.read(reader, given, ranks, scheduled=scheduled, progressive=progressive, errand=errand)
        world.flow()
        if copy:
            self._copy_all()
        if between == "home restarts":
            world.stop_home()
            world.start_home()
        elif between == "source restarts":
            world.restart_source()
        world.flow()
        for given in offered:
            if given in self._extensible():
                world.source.publish_more(given, 1, last=True)
                world.flow()
        self._copy_all()
        world.flow()
        world.pass_time(seconds)
        for reader, given in zip(world.readers, offered[::-1], strict=False):
            world.read(reader, given, ranks, scheduled=scheduled, errand=Errand(request_of(given)))
        world.flow()
        self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.source.can_publish)
    @rule(seed=PICK)
    def many_get_the_same_publication(self, seed: int) -> None:
        """The readers are its own, those of similar requests, and one of another request."""
        world, turns = self.world, random.Random(seed)
        request, other = (turns.randrange(len(REQUESTS)) for _ in range(2))
        begin, takes, late = turns.choice(("all", "blocks", "blocks", "a layer")), turns.choice(TAKES), turns.random()
        said = Said(REQUESTS[request], turns.choice(SAYS), generates=turns.random() < 0.7)
        world.publish(2, last=begin == "all", expected_reads=9, by_layers=begin == "a layer", said=said)
        offered = world.offered[-1]
        world.flow()
        if turns.random() < 0.3:
            world.stop_home()
            world.start_home()
            world.flow()
        for index, wanted in enumerate((request, request + 1, request - 1, other)):
            errand = Errand(
                REQUESTS[wanted % len(REQUESTS)], takes, late < 0.3, without_marks(offered.publication.reference)
            )
            # Both readers, since one may require marks.
            for reader in world.readers:
                world.read(reader, offered, 1, scheduled=True, progressive=index % 2 == 0, errand=errand)
        world.flow()
        self._copy_all()
        if offered in self._extensible():
            world.source.publish_more(offered, 1, last=True)
        world.flow()
        self._copy_all()
        world.flow()

    @precondition(lambda self: self.world.routed and self.world.source.can_publish)
    @rule(pick=PICK, reader=st.integers(0, 1), seconds=SECONDS)
    def a_routers_reference_is_used_twice(self, pick: int, reader: int, seconds: float) -> None:
        """For another request, whose publication is refused as long as the first is remembered."""
        world, routed = self.world, self._routed(pick)
        for _ in range(2):
            if world.source.can_publish and not routed.declined:
                try:
                    world.publish(1, last=True, expected_reads=1, routed=routed)
                except RouterKeyUsed:
                    world.source.poll()
            world.read(world.readers[reader], routed, 1, scheduled=True)
            world.flow()
            self._copy_all()
            world.flow()
            world.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.check_right_reader()
                self.many_get_the_same_publication(self.turns.randrange(1 << 16))
            except BaseException:
                self.world.close()
                raise
        super().teardown()
