"""Which tests must notice the mutants of which file, and which mutants are no mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PLAN = (
    "tests/plan/test_held_states.py",
    "tests/plan/test_planner_decisions.py",
    "tests/plan/test_line_rule.py",
    "tests/plan/test_requests.py",
    "tests/plan/test_selections.py",
)
REFUSALS = ("tests/plan/test_refusals.py", "tests/plan/test_overlaps.py", "tests/plan/test_statements.py")
ORACLE = ("tests/plan/test_oracle.py", "tests/plan/test_sweep.py")
HOME = (
    "tests/server/test_leases.py",
    "tests/server/test_publications.py",
    "tests/server/test_engines.py",
    "tests/server/test_home.py",
    "tests/server/test_decisions.py",
    "tests/server/test_authority.py",
)
MODEL = ("tests/model/test_model.py",)
DEFENCE = ("tests/data_plane/test_defence.py",)
READS = ("tests/data_plane/test_reads.py", "tests/data_plane/test_faults.py", "tests/data_plane/test_agents.py")
PORTS = ("tests/engine/test_ports.py", "tests/engine/test_step_thread.py")


@dataclass(frozen=True)
class Target:
    """A file.

    Attributes:
        stages: tests, the quickest first; a mutant that the first do not notice meets the next.
        equivalent: mutants that are no mistakes, by `Mutant.name`, with the reason.
    """

    stages: Sequence[Sequence[str]]
    equivalent: Mapping[str, str] = field(default_factory=dict)


PLANNER = (PLAN, REFUSALS, ORACLE)
LESSOR = (HOME, MODEL)
LEASE = ("tests/unit/test_leases.py", "tests/unit/test_lease_decisions.py")

MILLIONS = "one more or less of a limit of millions"
ONE_SHARD = "with one shard every state is held, whatever its interleave"
STRICT_ORDER = "any factor above the largest count keeps the cuts apart"
BEFORE_ANY = "a clock of a machine that runs reads more"
RESET = "set again before it is looked at"

TARGETS: dict[str, Target] = {
    "client/kvferry/line.py": Target(
        PLANNER,
        {"Line.pieces: 1 -> 2": STRICT_ORDER, "StateLayout.of: 1 -> 2": ONE_SHARD},
    ),
    "client/kvferry/covering.py": Target(
        PLANNER,
        {"Coverer.__init__: self._effort = 0 -> pass": RESET, "Coverer.cover: 0 -> 1": MILLIONS},
    ),
    "client/kvferry/expand.py": Target(PLANNER),
    "client/kvferry/rows.py": Target(PLANNER),
    "client/kvferry/needed.py": Target(PLANNER),
    "client/kvferry/segments.py": Target(PLANNER),
    "server/kvferry_server/lessor.py": Target(LESSOR),
    "server/kvferry_server/endings.py": Target(LESSOR),
    "server/kvferry_server/publications.py": Target(LESSOR),
    "server/kvferry_server/books.py": Target(LESSOR, {"Book.live_until: 0.0 -> 1.0": BEFORE_ANY}),
    "server/kvferry_server/leases.py": Target(LESSOR),
    "server/kvferry_server/engines.py": Target(LESSOR),
    "client/kvferry/leases.py": Target((LEASE, MODEL)),
    "client/kvferry/judgement.py": Target((LEASE, MODEL)),
    "client/kvferry/offers.py": Target((("tests/unit/test_offers.py",), MODEL)),
    "client/kvferry/defence.py": Target((DEFENCE,)),
    "client/kvferry/tracking.py": Target((("tests/data_plane/test_tracking.py",), READS)),
    "client/kvferry/links.py": Target((READS,)),
    "client/kvferry/reading.py": Target((READS,)),
    "client/kvferry/engine/scheduler.py": Target((PORTS,)),
    "client/kvferry/engine/reads.py": Target((PORTS,)),
    "client/kvferry/engine/worker.py": Target((PORTS,)),
}
