"""The goals of speed, each a number computed from the results and a bound. Ratios of one run; medians unless they say
otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.mooncake import KINDS, SIZES
from benchmarks.results import Results

Value = Callable[[Results], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table.

    Attributes:
        key: names its remark.
        what, against: for people.
        bound: the number to reach.
        at_most: whether the value may be at most the bound; else it has to be at least that.
        value: from the results.
        unit: of both.
    """

    key: str
    what: str
    against: str
    bound: float
    at_most: bool
    value: Value
    unit: str = ""

    def met(self, results: Results) -> bool:
        """Whether these results reach it, as the table shows them."""
        shown = float(number(self.value(results)))
        return shown <= self.bound if self.at_most else shown >= self.bound

    def missed_by(self, results: Results) -> str:
        """How far it is missed, as a factor; empty if it is met."""
        if self.met(results):
            return ""
        value = self.value(results)
        return f"{number(value / self.bound if self.at_most else self.bound / value)} ×"

    def wanted(self) -> str:
        """The bound, for people."""
        return f"{'≤' if self.at_most else '≥'} {self.bound:g} {self.unit}".rstrip()

    def found(self, results: Results) -> str:
        """The value, for people."""
        return f"{number(self.value(results))} {self.unit}".rstrip()


def number(value: float) -> str:
    """Two decimals below ten, one below a hundred."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(topic: str, name: str) -> Value:
    return lambda results: results.ratio(topic, name)


def _median(topic: str, name: str, factor: float = 1.0) -> Value:
    return lambda results: results.measure(topic, name).median * factor


def _p99(topic: str, name: str, factor: float = 1.0) -> Value:
    return lambda results: results.measure(topic, name).p99 * factor


def _speed(agents: str) -> Value:
    """Of whole reads in long runs, in memcpy's speed; the slowest case."""

    def value(results: Results) -> float:
        names = [f"whole read, {agents}, runs of {size} MiB" for size in (1, 8)]
        return min(1 / results.ratio("large_reads", name) for name in names)

    return value


def _scattered(agents: str) -> Value:
    """Of the movement of scattered pieces, in the speed of raw NIXL's best program; the slowest case."""

    def value(results: Results) -> float:
        names = [f"moving, {agents}, pieces of {size} KiB" for size in (16, 32, 64)]
        return min(1 / results.ratio("large_reads", name) for name in names)

    return value


def _tcp(best: bool) -> Value:
    """Of whole reads in long runs over TCP, in the speed of raw NIXL; the slowest case."""

    def value(results: Results) -> float:
        measures = results.topics["tcp_reads"].measures
        found = []
        for size in (1, 8):
            case = f"runs of {size} MiB"
            raw = (
                measures[f"moving, 1 reading agent, {case}"].against if best else f"raw NIXL, kvferry's options, {case}"
            )
            found.append(measures[raw].median / measures[f"whole read, 1 reading agent, {case}"].median)
        return min(found)

    return value


def _worst_choice(topic: str) -> Value:
    """Of the chosen path, in the time of the faster one; the worst cell."""

    def value(results: Results) -> float:
        cells = [name for name in results.topics[topic].measures if name.startswith("chosen, ")]
        return max(results.ratio(topic, name) for name in cells)

    return value


def _mooncake(sizes: Sequence[int]) -> Value:
    """Of whole reads over TCP, in Mooncake's time; the worst case that Mooncake can read."""

    def value(results: Results) -> float:
        names = [f"kvferry over TCP, {size} MiB, {kind}" for size in sizes for kind in KINDS]
        measures = results.topics["mooncake"].measures
        return max(results.ratio("mooncake", name) for name in names if measures[name].against)

    return value


def _lease_bytes(results: Results) -> float:
    names = ("memory per lease", "memory per publication of 16 scattered blocks")
    return sum(results.measure("fleet", name).median for name in names) / 1024


def _idle(results: Results) -> float:
    names = ("CPU with 10,000 leases, idle", "CPU with 1,000 engines, idle")
    return max(results.measure("fleet", name).median for name in names)


GOALS = (
    Goal("read", "read of 1 MiB, warm", "a bare unary echo", 2.5, True, _ratio("small_reads", "read, warm")),
    Goal(
        "leased",
        "the same with a lease",
        "a bare unary echo",
        4,
        True,
        _ratio("small_reads", "read, warm, with a lease"),
    ),
    Goal(
        "ports",
        "a request of 1 MiB through the ports, publish to `finished`",
        "the sum of its bare parts",
        1.4,
        True,
        _ratio("small_reads", "through the ports, publish to finished"),
    ),
    Goal(
        "concurrent",
        "16 concurrent readers of 1 MiB, requests/s",
        "raw NIXL without a control plane",
        0.25,
        False,
        _ratio("small_reads", "16 concurrent readers"),
    ),
    Goal("long", "runs of 1 and 8 MiB, huge pages", "memcpy, one thread", 0.95, False, _speed("1 reading agent")),
    Goal(
        "long-two",
        "runs of 1 and 8 MiB, huge pages, two reading agents",
        "memcpy, one thread",
        1.5,
        False,
        _speed("2 reading agents"),
    ),
    Goal(
        "scattered",
        "pieces of 16 to 64 KiB, their movement",
        "raw NIXL's best program, one agent",
        0.97,
        False,
        _scattered("1 reading agent"),
    ),
    Goal(
        "scattered-two",
        "pieces of 16 to 64 KiB, their movement, two reading agents",
        "raw NIXL's best program, one agent",
        1.5,
        False,
        _scattered("2 reading agents"),
    ),
    Goal("tcp", "runs of 1 and 8 MiB over TCP", "raw NIXL with the same options", 0.9, False, _tcp(best=False)),
    Goal("tcp-best", "runs of 1 and 8 MiB over TCP", "raw NIXL with its best options", 0.9, False, _tcp(best=True)),
    Goal("mooncake", "16 to 256 MiB over TCP", "Mooncake's transfer engine", 1, True, _mooncake(SIZES[1:])),
    Goal("mooncake-short", "1 MiB over TCP", "Mooncake's transfer engine", 5, True, _mooncake(SIZES[:1])),
    Goal(
        "choice",
        "direct or staged, on one host, worst cell",
        "the faster of the two",
        1.15,
        True,
        _worst_choice("paths"),
    ),
    Goal(
        "choice-tcp",
        "direct or staged, over TCP, worst cell",
        "the faster of the two",
        1.15,
        True,
        _worst_choice("tcp_paths"),
    ),
    Goal(
        "handshake",
        "Handshake, 32 planes",
        "a bare unary echo",
        3,
        True,
        _ratio("handshakes", "Handshake, 1 rank, 32 planes"),
    ),
    Goal(
        "handshakes",
        "renewals while 128 ranks handshake with 128 ranks, 99th percentile",
        "–",
        100,
        True,
        _p99("handshakes", "renewals meanwhile", 1e3),
        "ms",
    ),
    Goal("blocks", "ReadBlocks", "a bare call of the same size", 1.3, True, _ratio("server_calls", "ReadBlocks")),
    Goal("publish", "publish", "a bare call of the same size", 1.3, True, _ratio("server_calls", "Notify(publish)")),
    Goal("validate", "validate", "a bare call of the same size", 1.3, True, _ratio("server_calls", "Notify(validate)")),
    Goal("report", "report", "a bare call of the same size", 1.3, True, _ratio("server_calls", "Notify(read done)")),
    Goal(
        "cpu",
        "node server's CPU per read, 16 at once",
        "–",
        0.4,
        True,
        _median("small_reads", "node server's CPU per read, 16 at once", 1e3),
        "ms",
    ),
    Goal("trips", "round trips of a read", "–", 1, True, _median("small_reads", "calls per read")),
    Goal(
        "step",
        "engine step's part while 256 MiB move, 99th percentile",
        "a bare unary echo",
        0.3,
        True,
        _ratio("engine_steps", "99th percentile of these steps"),
    ),
    Goal(
        "renew",
        "renewal of a lease of 10,000, 99th percentile",
        "–",
        10,
        True,
        _p99("fleet", "renewing one lease of 10,000", 1e3),
        "ms",
    ),
    Goal(
        "lease",
        "memory of a lease, taken by ReadBlocks, and of its publication of 16 scattered blocks",
        "–",
        4,
        True,
        _lease_bytes,
        "KiB",
    ),
    Goal("idle", "idle, with 10,000 leases or 1,000 ranks", "a core", 1, True, _idle, "%"),
    Goal(
        "first",
        "first read of a process, warmed by `warm`",
        "a steady read",
        2,
        True,
        _ratio("first_reads", "first read, warmed by warm"),
    ),
)
