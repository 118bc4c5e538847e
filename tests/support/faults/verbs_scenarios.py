"""The scenarios over RDMA verbs: every row of the second table in tests/faults/RESULTS.md, in its order, and others.

Verbs read one-sidedly: the source's processes take no part, and a reader's NIXL is told of a dead source late, or never
(docs/nixl.md, Faults over verbs). What the home knows ends such a read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvferry import ReleaseOutcome
from kvferry.errors import EngineUnknown, TransferCancelled, TransferFailed
from tests.support.faults.scenario import Expected, Fate, Fault, Good, Moment, Row, Scenario, Target, Term
from tests.support.faults.scenarios import PROCESSES, UNNOTICED

READ, UNREAD = ReleaseOutcome.READ, ReleaseOutcome.UNREAD

TOLD = (Term.ENGINE, Term.RENEWAL)
"""Until the home counts a source as lost, and its reader is told with the answer to a renewal."""


def _of_processes() -> Iterator[Scenario]:
    """Those over TCP, but for what a one-sided transport does differently."""
    before, during = Moment.BEFORE, Moment.DURING
    killed, stopped = Fault.KILLED, Fault.STOPPED
    rank, engine, home = Target.SOURCE_RANK, Target.SOURCE_ENGINE, Target.HOME
    lost = Expected((TransferFailed,), TOLD, (UNREAD,), (Term.HOLD,), Fate.RECOMPUTED)
    differ = {
        (killed, rank, before): lost,
        (killed, rank, during): lost,
        (killed, engine, before): Expected((EngineUnknown,), (Term.ENGINE,), (), (), Fate.RECOMPUTED),
        (killed, engine, during): replace(lost, source=(), source_bound=()),
        (stopped, rank, before): UNNOTICED,
        (stopped, rank, during): UNNOTICED,
        (stopped, engine, before): UNNOTICED,
        (stopped, engine, during): UNNOTICED,
        (stopped, home, during): Expected(
            (Good(False),), (Term.VERDICT,), (READ, UNREAD), (Term.LEASE, Term.HOLD), Fate.SERVED
        ),
    }
    for scenario in PROCESSES:
        if scenario.moment is Moment.AFTER:
            # No transport moves anything then.
            continue
        expected = differ.get((scenario.fault, scenario.target, scenario.moment))
        if expected is None:
            yield scenario
        else:
            yield replace(scenario, expected=expected, still=False, timeout=None, note="")


VERBS_PROCESSES = tuple(_of_processes())
ALWAYS_PLAYED = tuple(
    scenario
    for scenario in VERBS_PROCESSES
    if scenario.fault is Fault.STOPPED
    and scenario.moment is Moment.DURING
    and scenario.target in (Target.SOURCE_RANK, Target.READER)
)
"""What `make test-rdma` plays of them; the others, which are like those over TCP, are played by hand."""

SOURCE_LOST = Row(
    "SIGKILL to a source rank while two ranks read from it and from another source",
    "during the read",
    Expected((TransferFailed,), TOLD, (UNREAD,), (Term.HOLD,), Fate.RECOMPUTED),
    "Its blocks are quiet at once, by the end of the agent that read them. Reads from the other source end well.",
)
UNMAPPED = Row(
    "The source unmaps its cache, as it may not",
    "during the read",
    UNNOTICED,
    "The card keeps the pages that were registered; so it does after NIXL has deregistered them.",
)
CANCELLED = Row(
    "The read is cancelled",
    "during the read",
    Expected((TransferCancelled,), (), (READ,), (), Fate.READ_AGAIN),
    "Chunks that are under way arrive before its blocks are quiet.",
)
DEVICE_DELETED = Row(
    "`rdma link delete` on the host of all ranks",
    "during the read",
    UNNOTICED,
    "The kernel waits until nobody has the device open. A process that starts after that has none (`NixlError`).",
)
VERBS_ROWS = (
    *(scenario.row for scenario in ALWAYS_PLAYED),
    SOURCE_LOST,
    UNMAPPED,
    CANCELLED,
    DEVICE_DELETED,
)
