"""The goal of vLLM's prefill and decode asked at the same time, from the times that `benchmarks.vllm_concurrent` has
written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.vllm_goals import OURS

SAMPLES = Path(__file__).parent / "results-vllm-concurrent.json"

PARTS, WHOLE = f"{OURS}, in parts", f"{OURS}, whole"
STEP = "a step of decode"
GOAL = 1.3
"""Most that any prompt may take, in what a prompt of one chunk takes."""

Samples = Mapping[str, Mapping[int, Sequence[float]]]
"""Seconds by way and number of chunks."""


def load() -> dict[str, dict[int, list[float]]]:
    """The samples of the last run."""
    found: dict[str, dict[str, list[float]]] = json.loads(SAMPLES.read_text())
    return {way: {int(chunks): taken for chunks, taken in times.items()} for way, times in found.items()}


def grown(samples: Samples, chunks: int) -> float:
    """Return what a median request in parts takes, in one of one chunk."""
    return median(samples[PARTS][chunks]) / median(samples[PARTS][1])


def grown_without_step(samples: Samples, chunks: int) -> float:
    """Return the same of what is left of each request without the step of decode that was measured after it, with the
    same prompt."""
    left = {
        length: median(took - step for took, step in zip(samples[PARTS][length], samples[STEP][length], strict=True))
        for length in (chunks, 1)
    }
    return left[chunks] / left[1]


def met(samples: Samples) -> bool:
    """Whether the goal is reached."""
    return _worst(samples)[0] <= GOAL


def verdict(samples: Samples) -> str:
    """Say whether the goal is reached, and whether it is without decode's own step."""
    worst, without = _worst(samples)
    share = median(samples[STEP][1]) / median(samples[PARTS][1])
    return (
        f"Goal: in parts, no prompt takes more than {GOAL:g} of one chunk. Measured: {worst:.2f}; {_judged(worst)}.\n"
        "\n"
        f"Part of it is a step of vLLM's own, {share:.2f} of the time of one chunk, which takes longer after a longer "
        f"prompt whatever has brought its blocks. Without it: {without:.2f}; {_judged(without)}."
    )


def row(samples: Samples) -> tuple[str, str, str, str, str]:
    """The line of the table of goals: the longest of all prompts."""
    worst, without = _worst(samples)
    what = (
        "[vLLM, both asked at once](../benchmarks/RESULTS-vllm-concurrent.md): prefill's answer to decode's first token"
    )
    found = f"{worst:.2f}, without vLLM's own step {without:.2f}"
    return (what, "a prompt of one chunk", f"≤ {GOAL:g}", found, f"{worst / GOAL:.2f} ×" if worst > GOAL else "")


def _worst(samples: Samples) -> tuple[float, float]:
    return max(grown(samples, chunks) for chunks in samples[PARTS]), max(
        grown_without_step(samples, chunks) for chunks in samples[PARTS]
    )


def _judged(worst: float) -> str:
    return "reached" if worst <= GOAL else f"missed by {worst / GOAL:.2f} ×"
