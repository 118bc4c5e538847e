"""The scenarios of the suite: every row of the table in tests/faults/RESULTS.md, in its order."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry import ReleaseOutcome
from kvferry.errors import (
    EngineUnknown,
    PublicationReleased,
    PublicationStale,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    Unreachable,
)
from tests.support.faults.scenario import Expected, Fate, Fault, Good, Moment, Row, Scenario, Target, Term, Until

LEASE, HOLD, ENGINE, TIMEOUT = Term.LEASE, Term.HOLD, Term.ENGINE, Term.TIMEOUT
VERDICT, RESTART, TCP, FENCE, FINAL, HEAL = Term.VERDICT, Term.RESTART, Term.TCP, Term.FENCE, Term.FINAL, Term.HEAL
PATIENCE = Term.PATIENCE
AT_ONCE, END, RELEASE = Until
SERVED, AGAIN, RECOMPUTED = Fate
READ, UNREAD = ReleaseOutcome.READ, ReleaseOutcome.UNREAD

GONE = (PublicationReleased, PublicationStale)
"""What a reference says whose publication was released, and then acknowledged."""

UNNOTICED = Expected((Good(),), (), (READ,), (), SERVED)
SERVED_BEFORE = Expected((), (), (READ,), (), SERVED)


def _of_processes() -> Iterator[Scenario]:
    before, during, after = Moment
    killed, stopped, restarted = Fault

    target = Target.SOURCE_RANK
    failed = Expected((TransferFailed,), (), (UNREAD,), (HOLD,), RECOMPUTED)
    stuck = Expected((TransferStuck,), (TIMEOUT,), (READ,), (), AGAIN)
    yield Scenario(killed, target, before, END, failed)
    yield Scenario(killed, target, during, END, failed)
    yield Scenario(killed, target, after, END, SERVED_BEFORE)
    note = (
        "Over TCP; by a one-sided transport (CMA, RDMA) a stopped source is read all the same. What was under way is "
        "UNCERTAIN until the rank goes on, or for the fence time."
    )
    yield Scenario(stopped, target, before, END, stuck, timeout=TIMEOUT, note=note)
    yield Scenario(stopped, target, during, END, stuck, timeout=TIMEOUT, note=note)
    yield Scenario(stopped, target, after, END, SERVED_BEFORE)

    target = Target.SOURCE_ENGINE
    note = "Its blocks are its own again when it starts, after `reuse_after` where its memory survived."
    lost = Expected((EngineUnknown,), (ENGINE,), (), (), RECOMPUTED)
    yield Scenario(killed, target, before, END, lost, note=note)
    yield Scenario(killed, target, during, END, Expected((TransferFailed,), (), (), (), RECOMPUTED))
    yield Scenario(killed, target, after, END, Expected((), (), (), (), SERVED))
    note = "For less than a ping and the engine ttl (25 s). Stopped for longer, the engine counts as dead."
    yield Scenario(stopped, target, before, END, stuck, timeout=TIMEOUT, note=note)
    yield Scenario(stopped, target, during, END, stuck, timeout=TIMEOUT, note=note)
    yield Scenario(stopped, target, after, END, SERVED_BEFORE)

    target = Target.READER
    elsewhere = Expected((), (), (READ,), (LEASE,), AGAIN)
    note = "By another engine."
    yield Scenario(killed, target, before, END, Expected((), (), (READ,), (), AGAIN), note=note)
    yield Scenario(killed, target, during, END, elsewhere, note=note)
    yield Scenario(killed, target, after, END, SERVED_BEFORE)
    yield Scenario(stopped, target, before, RELEASE, Expected(GONE, (), (UNREAD,), (HOLD,), RECOMPUTED))
    note = "The source has overwritten the blocks before it goes on."
    expired = Expected((TransferExpired,), (), (UNREAD,), (LEASE, HOLD), RECOMPUTED)
    yield Scenario(stopped, target, during, RELEASE, expired, note=note)
    yield Scenario(stopped, target, after, RELEASE, SERVED_BEFORE)

    target = Target.HOME
    waited = Expected((Good(),), (RESTART,), (READ,), (LEASE,), SERVED)
    trusted = Expected((Good(False),), (VERDICT,), (READ, UNREAD), (RESTART, LEASE, HOLD), SERVED)
    note = "The reader's own deadline decides; the new home knows of the read only if the reader reaches it."
    yield Scenario(killed, target, before, AT_ONCE, waited)
    yield Scenario(killed, target, during, END, trusted, note=note)
    late = Expected((), (), (READ, UNREAD), (RESTART, LEASE, HOLD), SERVED)
    yield Scenario(killed, target, after, END, late)
    asked = Expected((Unreachable,), (TIMEOUT,), (READ,), (), AGAIN)
    yield Scenario(stopped, target, before, END, asked, timeout=TIMEOUT)
    outlived = Expected((TransferExpired,), (LEASE,), (READ,), (), AGAIN)
    note = "The read stands still meanwhile: nobody renews its lease."
    yield Scenario(stopped, target, during, END, outlived, still=True, note=note)
    yield Scenario(stopped, target, after, END, SERVED_BEFORE)
    yield Scenario(restarted, target, before, AT_ONCE, waited)
    maybe = Expected((Good(None),), (VERDICT,), (READ, UNREAD), (RESTART, LEASE, HOLD), SERVED)
    yield Scenario(restarted, target, during, END, maybe)
    yield Scenario(restarted, target, after, END, late)

    target = Target.NODE
    for fault in (killed, stopped, restarted):
        yield Scenario(fault, target, before, END, UNNOTICED)
        yield Scenario(fault, target, during, END, UNNOTICED)
        yield Scenario(fault, target, after, END, SERVED_BEFORE)


PROCESSES = tuple(_of_processes())


def _of_machines() -> Iterator[Scenario]:
    """A node server and its engines at once, as when a virtual machine is paused; no process has died then."""
    before, during = Moment.BEFORE, Moment.DURING
    stopped = Fault.STOPPED

    target = Target.SOURCE_MACHINE
    asked = Expected((Unreachable,), (TIMEOUT,), (READ,), (), AGAIN)
    yield Scenario(stopped, target, before, END, asked, timeout=TIMEOUT)
    stuck = Expected((TransferStuck,), (TIMEOUT,), (READ,), (), AGAIN)
    yield Scenario(stopped, target, during, END, stuck, timeout=TIMEOUT)

    target = Target.READER_MACHINE
    yield Scenario(stopped, target, before, RELEASE, Expected(GONE, (), (UNREAD,), (HOLD,), RECOMPUTED))
    note = "The source has overwritten the blocks before it goes on."
    expired = Expected((TransferExpired,), (), (UNREAD,), (LEASE, HOLD), RECOMPUTED)
    yield Scenario(stopped, target, during, RELEASE, expired, note=note)


MACHINES = tuple(_of_machines())


def _without_a_lease() -> Iterator[Scenario]:
    """Those in which a read without a lease differs from one with a lease, or could."""
    before, during = Moment.BEFORE, Moment.DURING
    killed, stopped, restarted = Fault

    failed = Expected((TransferFailed,), (), (UNREAD,), (HOLD,), RECOMPUTED)
    yield Scenario(killed, Target.SOURCE_RANK, during, END, failed)
    stuck = Expected((TransferStuck,), (TIMEOUT,), (READ,), (), AGAIN)
    note = "It has asked for a lease after half a second."
    yield Scenario(stopped, Target.SOURCE_RANK, during, END, stuck, timeout=TIMEOUT, note=note)
    yield Scenario(killed, Target.SOURCE_ENGINE, during, END, Expected((TransferFailed,), (), (), (), RECOMPUTED))

    target = Target.READER
    note = "By another engine; the home knew of no read."
    yield Scenario(killed, target, during, END, Expected((), (), (READ,), (), AGAIN), note=note)
    refused = Expected((*GONE, TransferExpired), (), (UNREAD,), (HOLD,), RECOMPUTED)
    note = "The source has overwritten the blocks before it goes on."
    yield Scenario(stopped, target, during, RELEASE, refused, note=note)

    target = Target.HOME
    waited = Expected((Good(),), (RESTART,), (READ,), (LEASE,), SERVED)
    unheard = Expected((TransferExpired, Unreachable), (PATIENCE,), (READ,), (), AGAIN)
    note = "Nothing but the home's answer makes the bytes of such a read good."
    for fault in (killed, restarted):
        yield Scenario(fault, target, before, AT_ONCE, waited)
        yield Scenario(fault, target, during, AT_ONCE, waited)
    yield Scenario(killed, target, during, END, unheard, note=note)
    # The home that goes on takes up what was sent to it meanwhile, or finds that the hold is over.
    late = Expected((TransferExpired, Unreachable), (PATIENCE,), (READ, UNREAD), (HOLD,), RECOMPUTED)
    yield Scenario(stopped, target, during, END, late, note=note)

    yield Scenario(killed, Target.NODE, during, END, UNNOTICED)


WITHOUT_A_LEASE = tuple(_without_a_lease())

LEASED_IN_TIME = Expected((Good(None),), (), (READ, UNREAD), (RESTART, LEASE, HOLD), SERVED)
"""What a read of those scenarios sees that has got its lease before its home was gone: half a second may pass on a busy
machine until the fault comes."""

STOPPED_FOR_GOOD = Row(
    "SIGSTOP to a source rank, for good",
    "during the read",
    Expected((TransferStuck,), (TIMEOUT,), (UNREAD,), (HOLD,), RECOMPUTED),
    "Its blocks are quiet after the fence time; the source may abort when it goes on. Measured on the reader only.",
)
OVERWRITTEN = Row(
    "SIGSTOP to the destination rank until its blocks are overwritten, by every transport",
    "during the read",
    Expected((TransferExpired,), (), (UNREAD,), (LEASE, HOLD), RECOMPUTED),
)
NOBODY_CAME = Row("The reader never comes", "before the read", Expected(GONE, (), (UNREAD,), (HOLD,), RECOMPUTED))
HOME_GONE = Row(
    "SIGKILL to the source's node server, which never comes back",
    "after the publication",
    Expected((Unreachable,), (TIMEOUT,), (ReleaseOutcome.FINAL,), (FINAL,), RECOMPUTED),
    "Released by the source itself.",
)
DUPLICATES = Row("Every message twice", "always", UNNOTICED)
STRANGER = Row(
    "100 requests of a stranger to the source's node server whose path is not UTF-8",
    "during the read",
    UNNOTICED,
    "It ends grpcio's own asyncio server.",
)

HEALED_WHILE_IT_WAITS = Row(
    "Network cut, healed while the reader waits",
    "before the read",
    Expected((Good(),), (HEAL,), (READ,), (), SERVED),
)
CUT_TOO_LONG_TO_ASK = Row(
    "Network cut",
    "before the read",
    Expected((Unreachable,), (TIMEOUT,), (READ,), (), AGAIN),
)
HEALED_IN_TIME = Row(
    "Network cut, healed within the lease", "during the read", Expected((Good(None),), (HEAL,), (READ,), (), SERVED)
)
CUT_TOO_LONG = Row(
    "Network cut, healed after the release",
    "during the read",
    Expected((TransferExpired,), (LEASE,), (UNREAD,), (LEASE, HOLD), RECOMPUTED),
    "What was under way is UNCERTAIN until the network is back, or for the fence time: it still arrives.",
)
CUT_VERDICT = Row(
    "Network cut",
    "between the bytes and the home's verdict",
    Expected((Good(False),), (VERDICT,), (READ, UNREAD), (LEASE, HOLD), SERVED),
)
CUT_IDLE = Row("Network cut", "after the read", SERVED_BEFORE)
CUT_WITH_TCP_TIMEOUT = Row(
    "Network cut, with `tcp_user_timeout` set at the destination",
    "during the read",
    Expected((TransferFailed,), (TCP,), (UNREAD,), (LEASE, HOLD), RECOMPUTED),
    "The source rank can die when the network is back, so it is off by default. Measured on the reader only.",
)

ROWS = (
    *(scenario.row for scenario in (*PROCESSES, *MACHINES)),
    STOPPED_FOR_GOOD,
    OVERWRITTEN,
    NOBODY_CAME,
    HOME_GONE,
    HEALED_WHILE_IT_WAITS,
    CUT_TOO_LONG_TO_ASK,
    HEALED_IN_TIME,
    CUT_TOO_LONG,
    CUT_VERDICT,
    CUT_IDLE,
    CUT_WITH_TCP_TIMEOUT,
    DUPLICATES,
    STRANGER,
)
