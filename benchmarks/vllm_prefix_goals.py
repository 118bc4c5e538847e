"""The goal of prefixes that another vLLM engine has, from the times that `benchmarks.vllm_prefix` has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

SAMPLES = Path(__file__).parent / "results-vllm-prefix.json"

COMPUTED, FETCHED, OWN = "computed", "fetched", "in its own cache"
GOAL = 0.5
"""Most that a prompt may take whose prefix is fetched, in what it takes computed."""

Samples = Mapping[str, Sequence[float]]
"""Seconds to the first token by way, those of a prompt at the same place in each."""


def load() -> Samples:
    """The samples of the last run."""
    samples: Samples = json.loads(SAMPLES.read_text())
    return samples


def ratio(samples: Samples) -> float:
    """Return what a median prompt takes fetched, in a median one computed."""
    return median(samples[FETCHED]) / median(samples[COMPUTED])


def met(samples: Samples) -> bool:
    """Whether the goal is reached."""
    return ratio(samples) <= GOAL


def missed_by(samples: Samples) -> str:
    """How many times the goal is taken; empty if it is reached."""
    return "" if met(samples) else f"{ratio(samples) / GOAL:.2f} ×"


def verdict(samples: Samples) -> str:
    """Say whether the goal is reached."""
    judged = f"missed by {missed_by(samples)}" if missed_by(samples) else "reached"
    return f"Goal: fetched takes at most {GOAL:g} of computed. Measured: {ratio(samples):.2f}; {judged}."


def row(samples: Samples) -> tuple[str, str, str, str, str]:
    """The line of the table of goals."""
    what = "[vLLM, a prefix that another engine has](../benchmarks/RESULTS-vllm-prefix.md): time to first token"
    own = median(samples[OWN]) / median(samples[COMPUTED])
    found = f"{ratio(samples):.2f}, with the prefix in its own cache {own:.2f}"
    return (what, "the same prompt computed", f"≤ {GOAL:g}", found, missed_by(samples))
