"""One incarnation of an engine at its home: its ranks, and whether it and they are alive."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import EngineIncomplete
from kvferry.geometry.model import Group
from kvferry_server.domain.engine_description import EngineDescription
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import MAX_NAMED_NODES, MAX_NAMED_RANKS
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.times import NEVER, Times
from kvferry_server.domain.watch_feed import Feed, Process, RankLost, Role

STATES = ("ready", "incomplete", "lost", "dead")


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation at its home, also after it is `gone` while leases on its publications are live. All times are
    seconds on the home's clock."""

    ref: EngineRef
    times: Times
    lost_at: float | None = None  # when the scheduler's Watch ended; None while the Watch is open
    # The scheduler's Watch has been lost for `engine_ttl`. It may still come back and get its releases.
    dead: bool = False
    # Replaced, evicted, stopped by its scheduler, or dead for `retire`: no process acknowledges a release any more.
    gone: bool = False
    feeds: dict[Process, Feed] = field(default_factory=dict)  # of its processes that have had a Watch
    feed_bytes: int = 0
    groups: Mapping[str, Group] | None = None  # by name; None until a rank has registered
    # Kept when a rank is lost, since it may not register other content.
    ranks: dict[int, Registration] = field(default_factory=dict)
    lost_ranks: set[int] = field(default_factory=set)  # registered ranks whose process is gone
    watched_ranks: set[int] = field(default_factory=set)  # ranks with an open Watch of their own
    rank_lost_at: dict[int, float] = field(default_factory=dict)  # end of a rank's Watch, for an `engine_ttl`
    nodes: dict[int, str] = field(default_factory=dict)  # by rank, the relaying node server
    left_ranks: set[int] = field(default_factory=set)  # relayed ranks whose end their node server has reported
    host: str = ""  # origin of the scheduler's Watch; empty if unknown
    scheduled: float = NEVER
    cache_bytes: int = 0  # of all ranks
    block_bytes: Counter[str] = field(default_factory=Counter)  # of one block of each group, over all ranks
    _description: EngineDescription | None = None

    @property
    def watched(self) -> bool:
        """Whether the scheduler's Watch is open."""
        return self.lost_at is None and not self.gone

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.dead:
            return "dead"
        if self.lost_at is not None:
            return "lost"
        return "incomplete" if self.num_missing or self.first is None else "ready"

    @property
    def scheduler(self) -> Feed | None:
        """The feed of the scheduler; None until it has had a Watch here."""
        return self.feeds.get(Process(self.ref, Role.SCHEDULER))

    @property
    def first(self) -> Registration | None:
        """The first registration, which states the number of ranks, identity and groups for all."""
        return next(iter(self.ranks.values()), None)

    @property
    def num_ranks(self) -> int:
        """The number of ranks; 0 until one has registered."""
        return self.first.num_ranks if self.first else 0

    @property
    def num_missing(self) -> int:
        """The number of ranks that are not registered or are lost."""
        return self.num_ranks - len(self.ranks) + len(self.lost_ranks)

    def missing_ranks(self, most: int | None = None) -> list[int]:
        """Return the ranks that are not registered or are lost: the first `most` of them; None: all."""
        missing = (rank for rank in range(self.num_ranks) if rank not in self.ranks or rank in self.lost_ranks)
        return list(itertools.islice(missing, most))

    @property
    def description(self) -> EngineDescription | None:
        """The description of the ranks registered so far; None before the first."""
        if self._description is None and self.ranks:
            self._description = EngineDescription(self.ref, tuple(self.ranks[rank] for rank in sorted(self.ranks)))
        return self._description

    def completed_by(self, registration: Registration) -> EngineDescription | None:
        """Return the description of all ranks if this registration is the last that is missing; else None."""
        ranks = {**self.ranks, registration.rank: registration}
        if registration.rank in self.ranks or len(ranks) < registration.num_ranks:
            return None
        return EngineDescription(self.ref, tuple(ranks[rank] for rank in sorted(ranks)))

    def lost_with_node(self, rank: int) -> bool:
        """Whether a lost rank was lost with its node: a node server that is alive reports a rank that ends."""
        return rank in self.nodes and rank not in self.left_ranks

    def rank_lost(self, rank: int) -> RankLost:
        return RankLost(rank, self.nodes.get(rank, ""), self.lost_with_node(rank))

    def check_readable(self) -> EngineDescription:
        """Return the engine's description if its Watch is open and all its ranks are there; else raise
        `EngineIncomplete` with the missing ranks and their nodes."""
        ref, missing = self.ref, self.missing_ranks() if self.num_missing else []
        if self.lost_at is not None:
            problem = "its Watch is lost"
        elif self.description is None:
            problem = "no rank is registered"
        elif missing:
            some = ", ".join(map(str, missing[:MAX_NAMED_RANKS]))
            problem = f"{len(missing)} of {self.num_ranks} ranks are missing: {some}"
            problem += " ..." if len(missing) > MAX_NAMED_RANKS else ""
        else:
            return self.description
        listed, values = ",".join(map(str, missing[:MAX_NAMED_RANKS])), dict[str, Any](missing=len(missing))
        if nodes := sorted({self.nodes[rank] for rank in missing if rank in self.nodes})[:MAX_NAMED_NODES]:
            values["nodes"] = ",".join(nodes)
            problem += f"; on other nodes: {', '.join(nodes)}"
        if lost := sorted({self.nodes[rank] for rank in missing if self.lost_with_node(rank)})[:MAX_NAMED_NODES]:
            values["lost_nodes"] = ",".join(lost)
            problem += f"; nodes lost: {', '.join(lost)}"
        raise EngineIncomplete(f"{ref}: {problem}", engine_id=ref.engine_id, missing_ranks=listed, **values)

    def add(self, registration: Registration) -> None:
        """Add a rank's registration, or note that a lost rank is back."""
        if registration.rank not in self.ranks:
            self.ranks[registration.rank] = registration
            self.groups = self.groups or {group.name: group for group in registration.groups}
            self.cache_bytes += registration.cache_bytes
            self.block_bytes.update(registration.block_bytes)
            self._description = None
        self.lost_ranks.discard(registration.rank)

    def end(self) -> None:
        """Note that the incarnation is gone. Only what live leases on its publications need is kept."""
        self.gone, self.lost_at, self._description = True, None, None
        self.ranks.clear()
        self.rank_lost_at.clear()
        self.feeds.clear()

    def due(self) -> float:
        """When the engine or a rank counts as dead, or when the dead engine is forgotten."""
        ranks = min(self.rank_lost_at.values(), default=NEVER) + self.times.engine_ttl
        if self.lost_at is None:
            return ranks
        return min(ranks, self.lost_at + self.times.engine_ttl + (self.times.retire if self.dead else 0.0))
