"""The curves of docs/performance.md, drawn by matplotlib from the results."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from benchmarks.fleet import ENGINES, LEASES
from benchmarks.lengths import SHAPES, TOKENS, label
from benchmarks.paths import HEADS_READ, RUNS, Case
from benchmarks.results import Results

SIZE = (6.4, 3.4)
COLOURS = ("#1f5fa8", "#c2571a", "#3a8a4d", "#7a4da0")


def draw(results: Results, folder: Path) -> None:
    """Write every picture as SVG; raises `ImportError` without matplotlib (the extra `bench`)."""
    pictures = {
        "curve-engines": (_engines, "Calls by the number of engines", "Publish, blocks and report of one request"),
        "curve-leases": (_leases, "Renewals by the number of leases", "Time of one renewal while all are renewed"),
        "curve-tokens": (_tokens, "Reads by the length of the request", "Time in that of raw NIXL's best program"),
        "curve-paths": (_paths, "Direct and staged reads by the size of pieces", "Staged time in direct time"),
    }
    for name, (plot, title, description) in pictures.items():
        (folder / f"{name}.svg").write_text(_svg(plot, results, title, description))


def _svg(plot: Any, results: Results, title: str, description: str) -> str:
    import matplotlib

    # No window, no random names, text as text.
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    plot(axes, results)
    axes.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    drawn = re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE)
    # For readers who do not see it, as every picture of these documents has it.
    labelled = f'<title id="title">{title}</title>\n <desc id="desc">{description}.</desc>\n'
    drawn = re.sub(r"(<svg [^>]*)>", r'\1 role="img" aria-labelledby="title desc">\n ' + labelled, drawn, count=1)
    return drawn[drawn.index("<svg ") :]


def _band(axes: Any, xs: list[float], lows: list[float], highs: list[float], colour: str) -> None:
    axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)


def _engines(axes: Any, results: Results) -> None:
    found = [results.measure("fleet", f"publish, blocks and report with {count:,} engines") for count in ENGINES]
    echoes = [results.measure("fleet", measure.against).median for measure in found]
    xs = [float(count) for count in ENGINES]
    ratios = [measure.median / echo for measure, echo in zip(found, echoes, strict=True)]
    axes.plot(xs, ratios, "o-", color=COLOURS[0], label="three calls, in echoes of the same run")
    lows = [measure.p10 / echo for measure, echo in zip(found, echoes, strict=True)]
    highs = [measure.p90 / echo for measure, echo in zip(found, echoes, strict=True)]
    _band(axes, xs, lows, highs, COLOURS[0])
    axes.set(xscale="log", xlabel="engines at the home", ylabel="echoes (10 % – 90 %)", ylim=(0, None))


def _leases(axes: Any, results: Results) -> None:
    xs = [float(count) for count in LEASES]
    found = [results.measure("fleet", f"renewing one lease of {count:,}") for count in LEASES]
    for index, (name, values) in enumerate(
        (("median", [one.median for one in found]), ("99th percentile", [one.p99 for one in found]))
    ):
        axes.plot(xs, [1e3 * value for value in values], "o-", color=COLOURS[index], label=name)
    axes.axhline(10, color="#888888", linestyle="--", linewidth=0.8, label="goal for the 99th percentile")
    axes.set(xscale="log", xlabel="live leases", ylabel="ms of one renewal", ylim=(0, None))


def _tokens(axes: Any, results: Results) -> None:
    xs = [float(count) for count in TOKENS]
    for index, shape in enumerate(SHAPES):
        cases = [label(count, shape) for count in TOKENS]
        for style, kind in (("o-", "whole read"), ("s--", "moving")):
            ratios = [results.quotient("lengths", f"{kind}, kvferry, {case}", f"raw NIXL, {case}") for case in cases]
            axes.plot(xs, ratios, style, color=COLOURS[index], label=f"{kind}, {shape}")
    axes.axhline(1, color="#888888", linestyle=":", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time in raw NIXL's")


def _paths(axes: Any, results: Results) -> None:
    for index, heads in enumerate(HEADS_READ):
        for style, topic, where in (("o-", "paths", "one host"), ("s--", "tcp_paths", "TCP")):
            cases = [Case(size, heads).label for size in RUNS]
            ratios = [results.quotient(topic, f"staged, {case}", f"direct, {case}") for case in cases]
            axes.plot(RUNS, ratios, style, color=COLOURS[index], label=f"{heads} of 8 heads, {where}", markersize=4)
    axes.axhline(1, color="#888888", linestyle=":", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a piece", ylabel="staged time in direct time")
