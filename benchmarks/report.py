"""Writes docs/performance.md, its curves, and RESULTS.md from results.json: `python -m benchmarks.report`.

The prose is in performance.template and results.template, the reasons for missed goals are in `benchmarks.remarks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import breakdown, model, vllm_concurrent_goals, vllm_goals, vllm_prefix_goals
from benchmarks.goals import GOALS
from benchmarks.handshakes import RANKS
from benchmarks.limits import ADDED, ALONE, BESIDE, CONNECTING, HANDED, HANDSHAKE, LONG_PAUSED, MET, PAUSED, READ
from benchmarks.pages import HUGE, SMALL
from benchmarks.remarks import REMARKS
from benchmarks.results import RESULTS, Results, TopicResult, shown
from benchmarks.spinning import HELPER, SPINS
from benchmarks.tables import Table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PERFORMANCE = ROOT / "docs" / "performance.md"
TABLES = FOLDER / "RESULTS.md"


def goals(results: Results) -> str:
    """The table of goals."""
    rows = [(goal.what, goal.against, goal.wanted(), goal.found(results), goal.missed_by(results)) for goal in GOALS]
    rows += [found.row(found.load()) for found in (vllm_goals, vllm_concurrent_goals, vllm_prefix_goals)]
    return Table("", ("what", "against", "goal", "measured", "missed by"), rows).lines()


def reasons(results: Results) -> str:
    """Why the goals that are missed are missed.

    Raises:
        KeyError: one has no remark.
    """
    missed = [goal for goal in GOALS if not goal.met(results)]
    lines = [f"- **{goal.what}** ({goal.found(results)}): {REMARKS[goal.key]}" for goal in missed]
    lines.append(f"- **vLLM**: {REMARKS['vllm']}")
    if not vllm_concurrent_goals.met(vllm_concurrent_goals.load()):
        lines.append(f"- **vLLM, both asked at once**: {REMARKS['vllm concurrent']}")
    if not vllm_prefix_goals.met(vllm_prefix_goals.load()):
        lines.append(f"- **vLLM, a prefix that another engine has**: {REMARKS['vllm prefix']}")
    return "\n".join(lines)


def machine(results: Results) -> str:
    """What was measured on, in one sentence, with the load."""
    said = results.machine
    loads = [value for topic in results.topics.values() for value in topic.load]
    return (
        f"{said['cores']} cores ({said['processor']}), Linux {said['kernel']}, Python {said['Python']}, grpcio "
        f"{said['grpcio']}, numpy {said['numpy']}; load averages, the measurements included, "
        f"of {min(loads):.1f} to {max(loads):.1f}"
    )


def reservations(results: Results) -> str:
    """What keeps these results from being those of one run on an idle machine, if anything does."""
    topics = results.topics.values()
    said = []
    busy = [name for name, topic in results.topics.items() if topic.load[0] > 2 * int(results.machine["cores"])]
    if busy:
        said.append(
            f"The goals ask for idle cores, and **these were not idle**: other work ran beside {len(busy)} of "
            f"{len(topics)} topics, at lower priority. Ratios within a topic hold better "
            "than times, and neither as well as on a quiet machine."
        )
    revisions = sorted({topic.revision for topic in topics})
    if len(revisions) > 1:
        said.append(
            f"Not all topics were measured at one revision ({', '.join(revisions)}; + means with changes that "
            "were not committed): do not compare times across topics."
        )
    return " ".join(said)


def performance(results: Results) -> str:
    """docs/performance.md."""
    costs = model.Costs.of(results)
    return _filled(
        "performance",
        {
            "machine": machine(results),
            "reservations": reservations(results),
            "goals": goals(results),
            "wall": _time(results, "handshakes", f"all handshakes of {RANKS} ranks with {RANKS} ranks"),
            "decode": _time(results, "handshakes", "decoding one of their answers and planning with it"),
            "workers": breakdown.workers(results).lines(),
            "paused": f"{results.ratio('limits', PAUSED):.2f}",
            "added short": _time(results, "limits", ADDED[1]),
            "added long": _time(results, "limits", ADDED[256]),
            "met": _time(results, "limits", MET),
            "met handshake": _time(results, "limits", HANDSHAKE),
            "met connecting": _time(results, "limits", CONNECTING),
            "spinning": f"{results.ratio('spinning', SPINS):.0f}",
            "huge": pages(results),
            "trips": f"{results.measure('small_reads', 'calls per read').median:.2g}",
            "line rate": model.at_line_rate(costs).lines(),
            "bottleneck": model.bottleneck(costs),
            "homes": model.at_most_homes(results),
        },
    )


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (FOLDER / f"{template}.template").read_text()
    for name, value in values.items():
        text = text.replace(f"{{{{ {name} }}}}", value.strip())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def pages(results: Results) -> str:
    """Huge pages against small ones, with both spreads, and whether they decide anything."""
    huge, small = results.measure("pages", HUGE), results.measure("pages", SMALL)
    spreads = " against ".join(
        f"{shown(found.p10, found.unit)} to {shown(found.p90, found.unit)}" for found in (huge, small)
    )
    overlap = max(huge.p10, small.p10) <= min(huge.p90, small.p90)
    verdict = "; these overlap, so that this run does not decide it" if overlap else ""
    return f"{results.ratio('pages', HUGE):.2f} of the time (median; 10 % to 90 %: {spreads}{verdict})"


def _time(results: Results, topic: str, name: str) -> str:
    found = results.measure(topic, name)
    return shown(found.median, found.unit)


def tables(results: Results) -> str:
    """RESULTS.md."""
    costs = model.Costs.of(results)
    return _filled(
        "results",
        {
            "machine": machine(results),
            "reservations": reservations(results),
            "reasons": reasons(results),
            "stages": breakdown.stages(results).lines(),
            "movement": breakdown.movement(results).lines(),
            "mooncake": breakdown.beside_mooncake(results).lines(),
            "long paused": f"{results.ratio('limits', LONG_PAUSED):.2f}",
            "paused call": _time(results, "limits", PAUSED),
            "handed": _time(results, "limits", HANDED),
            "handed echoes": f"{results.ratio('limits', HANDED):.2f}",
            "beside steps": f"{results.ratio('limits', BESIDE):.2f}",
            "read alone": f"{1 / results.quotient('limits', READ, ALONE):.2f}",
            "read beside": f"{1 / results.ratio('limits', READ):.2f}",
            "helper": f"{results.ratio('spinning', HELPER):.2f}",
            "fleet": model.fleet(costs).lines(),
            "check": model.check(costs, results).lines(),
            "several homes": model.several_homes(results).lines(),
            "topics": "\n".join(_topic(topic) for topic in results.topics.values()),
        },
    )


def _topic(topic: TopicResult) -> str:
    load = f"load {topic.load[0]} before and {topic.load[1]} after"
    said = f"{topic.when} UTC, revision {topic.revision}, {load}, {topic.took} s."
    return f"{topic.table().markdown()}\n{said}\n"


def main() -> None:
    """Write all."""
    from benchmarks import plots

    results = Results.parse(RESULTS.read_text())
    PERFORMANCE.write_text(performance(results))
    TABLES.write_text(tables(results))
    plots.draw(results, PERFORMANCE.parent)


if __name__ == "__main__":
    main()
