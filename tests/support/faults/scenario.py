"""What a scenario is: a fault, when it comes, and what each side must see of it, in how long."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry import KvferryError, ReleaseOutcome
from kvferry._cache import READ_TIMEOUT
from kvferry._control.acquisition import HOME_PATIENCE
from kvferry._control.lease_holder import VERDICT_TIMEOUT
from kvferry._control.publications import LOCAL_RELEASE_MARGIN, LOCAL_RELEASE_SHARE
from kvferry._transport.nixl_options import NixlOptions
from kvferry_server.domain.times import Times
from tests.support.faults.fault_world import READING, TIMES

SLACK = 20.0
"""Seconds that a busy machine may add to any bound. A bound says that something ends, it is no measurement."""


class Fate(enum.Enum):
    """What becomes of the request."""

    SERVED = "served"
    READ_AGAIN = "read again"
    RECOMPUTED = "recomputed"


class Term(enum.Enum):
    """A time that bounds something: its name, seconds by default, seconds in this suite."""

    LEASE = ("lease", Times().ttl, TIMES.ttl)
    HOLD = ("hold", Times().hold, TIMES.hold)
    ENGINE = ("engine ttl", Times().engine_ttl, TIMES.engine_ttl)
    FINAL = (
        "final + margin",
        Times().final * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN,
        TIMES.final * (1 + LOCAL_RELEASE_SHARE) + LOCAL_RELEASE_MARGIN,
    )
    TIMEOUT = ("read's timeout", READ_TIMEOUT, 1.5)
    VERDICT = ("verdict", VERDICT_TIMEOUT, VERDICT_TIMEOUT)
    PATIENCE = ("patience with a home", HOME_PATIENCE, HOME_PATIENCE)
    TCP = ("UCX's TCP timeout", 0.0, 1.0)
    FENCE = ("fence", NixlOptions().fence_time, NixlOptions(**READING).fence_time)
    RESTART = ("restart", 0.0, SLACK)
    RENEWAL = ("renewal", Times().ttl / 3, TIMES.ttl / 3)
    HEAL = ("until TCP sends again", 0.0, SLACK)

    @property
    def title(self) -> str:
        """For people."""
        return self.value[0]

    @property
    def default(self) -> float:
        """Seconds as kvferry is installed; 0: not kvferry's to say."""
        return self.value[1]

    @property
    def here(self) -> float:
        """Seconds in this suite."""
        return self.value[2]


Bound = tuple[Term, ...]
"""A sum of times; empty: nothing is waited for but the calls themselves."""


def seconds(bound: Bound) -> float:
    """A bound in this suite."""
    return sum(term.here for term in bound) + SLACK


@dataclass(frozen=True)
class Good:
    """Every byte arrived. `confirmed`: the home said so too; None: it may have."""

    confirmed: bool | None = True


@dataclass(frozen=True)
class Expected:
    """What each side sees.

    Attributes:
        destination: how the read may end; empty: its reader is gone, or had ended it before.
        destination_bound: in how long, from when both it and its reader are there.
        source: how the publication may end; empty: its source is gone.
        source_bound: in how long, from the end of the read; where no read ends, from the fault.
        fate: of the request.
    """

    destination: tuple[Good | type[KvferryError], ...]
    destination_bound: Bound
    source: tuple[ReleaseOutcome, ...]
    source_bound: Bound
    fate: Fate


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        fault: what is done to whom, and for how long.
        moment: when.
        expected: what each side sees.
        note: for people.
    """

    fault: str
    moment: str
    expected: Expected
    note: str = ""


class Fault(enum.Enum):
    """What is done to a process."""

    KILLED = "SIGKILL"
    STOPPED = "SIGSTOP"
    RESTARTED = "SIGTERM"


class Target(enum.Enum):
    """To whom."""

    SOURCE_RANK = "a source rank"
    SOURCE_ENGINE = "the source engine"
    READER = "the destination rank"
    HOME = "the source's node server"
    NODE = "the destination's node server"
    SOURCE_MACHINE = "the source's machine"
    READER_MACHINE = "the destination's machine"
    RELAY = "a relay"

    @property
    def restarts_alone(self) -> bool:
        """Whether it can be started again at the same place without others."""
        return self in (Target.HOME, Target.NODE, Target.RELAY)


class Moment(enum.Enum):
    """When."""

    BEFORE = "before the read"
    DURING = "during the read"
    AFTER = "after the read"


class Until(enum.Enum):
    """How long the fault lasts."""

    AT_ONCE = "while the reader waits"
    END = "after the read's end"
    RELEASE = "after the release"


@dataclass(frozen=True)
class Scenario:
    """A fault of a process.

    Attributes:
        fault, target, moment, until: what is done to whom, when, how long.
        expected: what each side sees.
        still: bytes do not move while the fault lasts.
        timeout: of the read; None: much longer than the fault.
        note: for people.
    """

    fault: Fault
    target: Target
    moment: Moment
    until: Until
    expected: Expected
    still: bool = False
    timeout: Term | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """For the test."""
        parts = self.target, self.fault, self.moment, self.until
        return "-".join(part.name.lower().replace("_", "-") for part in parts)

    @property
    def row(self) -> Row:
        """For the table."""
        what = f"{self.fault.value} to {self.target.value}"
        if self.until is not Until.END:
            what += f", back {self.until.value}"
        return Row(what, self.moment.value, self.expected, self.note)
