"""The state machine with an operator: calls of `Admin`, under a read and at any other moment."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvferry.errors import KvferryError
from tests.model.machine import PICK, SECONDS, Machine

Act = Literal["end a lease", "abort", "drain", "evict"]
ACTS = st.sampled_from(Act.__args__)  # type: ignore[attr-defined]


class OperatedMachine(Machine):
    """The rules hold whatever an operator does: no lease ends early, and no release is lost or repeated."""

    @rule(what=ACTS, pick=PICK, calm=st.booleans())
    def an_operator_acts(self, what: Act, pick: int, calm: bool) -> None:
        self._act(what, pick)
        self._calm(calm)

    @precondition(lambda self: self.world.source.can_publish)
    @rule(what=ACTS, reader=st.integers(0, 1), copy=st.booleans(), seconds=SECONDS, repeated=st.booleans())
    def an_operator_acts_under_a_read(self, what: Act, reader: int, copy: bool, seconds: float, repeated: bool) -> None:
        """The read goes on until its reader notices; all earlier messages may be repeated."""
        world = self.world
        self._publish_and_read(world.readers[reader], 1, scheduled=True, repeated=repeated)
        # The last lease and publication are those of the read.
        self._act(what, -1)
        if repeated:
            self._stragglers_arrive()
        if copy:
            self._copy_all()
        world.flow()
        world.pass_time(seconds)
        world.flow()

    def _act(self, what: Act, pick: int) -> None:
        world = self.world
        if world.host is None:
            return
        host = world.host
        home = host.home
        with suppress(KvferryError), home.turn():
            if what == "end a lease":
                leases = sorted(home.records.leases(), key=lambda lease: lease.number)
                if leases:
                    lease = leases[pick % len(leases)]
                    home.lessor.revoke(lease.publication.source, lease.number)
            elif what == "abort" and world.offered:
                offered = world.offered[pick % len(world.offered)]
                home.sources.withdraw(offered.source.ref, offered.number)
                host.withdrawn.add((offered.source.ref, offered.number))
            elif what == "drain":
                home.drain()
            elif what == "evict":
                home.engines.evict(world.source.ref)
        if what == "evict":
            # The operator restarts the engine at once, over the same memory.
            world.restart_source()
        world.settle()
