"""What is wrong at a node server, the worst first, and what to do next: the head of its page.

docs/runbook.md says more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry._summaries import RECOVERING, duration, ranges
from kvferry.stats import shown
from kvferry_server.admin.node_state import NodeState
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.journal import RECENT, BadEnd
from kvferry_server.domain.limits import MAX_NAMED_NODES, MAX_NAMED_RANKS
from kvferry_server.domain.values import LeaseState

MAX_ENGINES = 50  # That are described; the rest are counted
WORST_FIRST = ("dead", "lost", "incomplete")  # States of engines

LOOK = "Unless it was stopped on purpose, look at its scheduler's log, and start it again."
COMES_BACK = f"Wait whether it comes back. {LOOK}"
RANKS_GONE = "Look at the logs of these ranks and of their nodes, and restart the engine."
RANKS_ABSENT = (
    "Look at the logs of these ranks. Frequent: another token, a node server that cannot reach this one, or one whose "
    "relay_homes does not name it."
)
FAILED = "Look in the log of the reader's rank, which names the source's rank; then at the network between them."
EXPIRED = "Look at the reader: it died, it hangs, or it cannot reach this node server."
NEVER_CAME = "Look at the source: it has not published what the reader waited for."


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        state: ``dead``, ``lost``, ``incomplete``, ``failed``, ``expired``, or one of the node server itself.
    """

    state: str
    what: str
    next_step: str


def problems(node: NodeState, *, recovering: bool) -> tuple[Sequence[Problem], int]:
    """Return the problems, and the number of further engines that are not ready. `recovering`: the home waits for its
    engines, or for their snapshots. Call within a turn."""
    now = node.home.clock.now()
    ill = [engine for engine in node.engines if engine.state in WORST_FIRST]
    ill.sort(key=lambda engine: (WORST_FIRST.index(engine.state), engine.ref.engine_id))
    engines = [_of_engine(engine, now) for engine in ill[:MAX_ENGINES]]
    bad = reversed(node.home.journal.bad_ends.items())
    reads = [_of_reads(kind, count, now - last) for kind, (count, last) in bad if last > now - RECENT]
    return [*_of_node(node, recovering), *engines, *reads], max(0, len(ill) - MAX_ENGINES)


def _of_node(node: NodeState, recovering: bool) -> Iterator[Problem]:
    if why := node.why_not_healthy():
        yield Problem("ill", why, "Restart this node server: its state is soft, and reads under way go on.")
    if why := node.why_not_ready():
        yield Problem("unready", f"it takes no new work: {why}", "Wait, and restart it if this lasts.")
    if recovering:
        yield Problem("recovering", f"it {RECOVERING}", "Wait: engines come back by themselves.")


def _of_engine(engine: Engine, now: float) -> Problem:
    name = engine.ref.engine_id
    if engine.lost_at is None:
        what, next_step = _incomplete(engine)
        return Problem(engine.state, f"{name!r}: {what}", next_step)
    away, ttl = f"its scheduler has been away for {duration(now - engine.lost_at)}", duration(engine.times.engine_ttl)
    if engine.dead:
        return Problem("dead", f"{name!r}: {away}; its publications have ended", LOOK)
    return Problem("lost", f"{name!r}: {away}; it counts as dead after {ttl}", COMES_BACK)


def _incomplete(engine: Engine) -> tuple[str, str]:
    """Return which ranks an engine lacks, and what to do."""
    named = engine.missing_ranks(MAX_NAMED_RANKS)
    gone = [rank for rank in named if rank in engine.lost_ranks]
    absent = [rank for rank in named if rank not in engine.lost_ranks]
    what = [f"gone: {_ranks(gone)}"] if gone else []
    what += [f"not registered: {_ranks(absent)}"] if absent else []
    if left := engine.num_missing - len(named):
        what.append(f"and {left} more")
    if nodes := sorted({engine.nodes[rank] for rank in gone if engine.lost_with_node(rank)}):
        what.append(f"lost nodes: {', '.join(nodes[:MAX_NAMED_NODES])}")
    missing = f"{engine.num_missing} of {engine.num_ranks} ranks are missing; {'; '.join(what)}"
    return missing if what else "no rank has registered", RANKS_GONE if gone else RANKS_ABSENT


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _of_reads(kind: BadEnd, count: int, ago: float) -> Problem:
    """Sum up reads that ended badly; the last of them so many seconds ago."""
    when = f"{count} reads, the last" if count > 1 else "a read,"
    why = f", {kind.reason}" if kind.reason else ", which waited in vain" if kind.in_vain else ""
    what = f"{kind.reader!r} from {kind.source!r}: {when} {duration(ago)} ago{why}"
    ended = FAILED if kind.state is LeaseState.FAILED else EXPIRED
    return Problem(shown(kind.state), what, NEVER_CAME if kind.in_vain else ended)
