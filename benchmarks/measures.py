"""What a benchmark returns: measures of one topic, with their samples; and how actions are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity, measured several times in one run.

    Attributes:
        name: what was measured; unique in its topic.
        unit: "s", "B", "1/s" or another.
        samples: the values found, at least one.
        against: name of the measure of the same topic that this one is compared with; empty: none.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    against: str = ""

    @classmethod
    def of(cls, name: str, unit: str, samples: Sequence[float] | float, against: str = "") -> Measure:
        """A measure of any numbers, or of a single one."""
        values = (samples,) if isinstance(samples, float | int) else samples
        return cls(name, unit, tuple(float(value) for value in values), against)


@dataclass(frozen=True, slots=True)
class Topic:
    """The measures of one topic, all of one run.

    Attributes:
        name: the module's.
        title: what was measured, as the heading of a table.
        measures: in the order of the table.
    """

    name: str
    title: str
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a run measures.

    Attributes:
        smoke: only whether every benchmark runs and every byte is right: each action once, on small sizes.
    """

    smoke: bool = False

    def repeats(self, count: int) -> int:
        """How often to repeat an action that a full run repeats `count` times."""
        return 1 if self.smoke else count

    def size(self, full: int, smoke: int) -> int:
        """A size that depends on the effort."""
        return smoke if self.smoke else full


FULL = Effort()
SMOKE = Effort(smoke=True)


def _nothing() -> None:
    """Before and after an action that needs neither."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is timed, between what is not.

    Attributes:
        run: timed.
        prepare: runs before, e.g. poisons the destination.
        verify: runs after, and raises if the action did not do its work.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    verify: Callable[[], object] = _nothing

    def seconds(self) -> float:
        """Run it once; the seconds of `run` alone."""
        self.prepare()
        began = time.perf_counter()
        self.run()
        took = time.perf_counter() - began
        self.verify()
        return took


def interleaved(actions: Mapping[str, Action], repeats: int, *, warm: int = 1) -> dict[str, tuple[float, ...]]:
    """Time several actions in turns, so that whatever else the machine does hits all of them. Every second round runs
    them in the opposite order: an action leaves the caches and the processes warm for its neighbour.

    Args:
        actions: by name.
        repeats: rounds that count.
        warm: rounds before them, which do not.

    Returns:
        Seconds by name, one per round.
    """
    orders = list(actions.items()), list(actions.items())[::-1]
    rounds = [{name: action.seconds() for name, action in orders[at % 2]} for at in range(warm + repeats)][warm:]
    return {name: tuple(found[name] for found in rounds) for name in actions}


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` of them lie; with one sample, that one."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(samples: Sequence[float]) -> float:
    """The median."""
    return statistics.median(samples)
