"""The goal beside vLLM's own connector, from the times that `benchmarks.vllm_pd` has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

SAMPLES = Path(__file__).parent / "results-vllm.json"
"""Seconds by request and connector."""

THEIRS, OURS = "NixlConnector", "kvferry"
FIRST = "first request"
MEDIAN, FASTEST, FIRST_REQUEST = 0.8, 1.0, 1.0
"""What ours may take at most, in theirs."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]


def row(samples: Samples) -> tuple[str, str, str, str, str]:
    """The line of the table of goals: the best and the worst request of each kind."""
    steady = [found for what, found in samples.items() if FIRST not in what]
    kinds = {
        "median": (MEDIAN, [median(found[OURS]) / median(found[THEIRS]) for found in steady]),
        "fastest": (FASTEST, [min(found[OURS]) / min(found[THEIRS]) for found in steady]),
        "first": (
            FIRST_REQUEST,
            [median(found[OURS]) / median(found[THEIRS]) for what, found in samples.items() if FIRST in what],
        ),
    }
    wanted = ", ".join(f"{kind} ≤ {most:g}" for kind, (most, _) in kinds.items())
    found = ", ".join(f"{kind} {min(ratios):.2f} to {max(ratios):.2f}" for kind, (_, ratios) in kinds.items())
    missed = [f"{kind} {max(ratios) / most:.2f} ×" for kind, (most, ratios) in kinds.items() if max(ratios) > most]
    what = "[vLLM](../benchmarks/RESULTS-vllm.md): prefill's answer to decode's first token"
    return (what, THEIRS, wanted, found, ", ".join(missed))


def load() -> Samples:
    """The samples of the last run."""
    samples: Samples = json.loads(SAMPLES.read_text())
    return samples
