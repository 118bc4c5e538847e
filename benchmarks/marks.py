"""What the marks of a prompt of 131,072 tokens cost a source or a reader: against a bare hash of the same bytes."""

from __future__ import annotations

import hashlib

import numpy as np

from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from kvferry import Prompt

TOKENS = 131_072
REPEATS = 200
KEY = bytes(16)
BARE = "SHA-256 of the token ids"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    ids: list[int] = np.random.default_rng(0).integers(0, 150_000, effort.size(TOKENS, 64)).tolist()
    words = np.array(ids, "<u4").tobytes()
    prompt = Prompt(ids)
    longer: list[Prompt] = []
    times = interleaved(
        {
            "bare": Action(lambda: hashlib.sha256(words).digest()),
            "made": Action(lambda: Prompt(ids)),
            "marked": Action(lambda: prompt.mark(KEY, len(prompt))),
            "longer": Action(
                lambda: longer[-1].mark(KEY, len(ids) + 1), prepare=lambda: longer.append(prompt.followed_by([1]))
            ),
        },
        effort.repeats(REPEATS),
    )
    measures = (
        Measure(BARE, "s", times["bare"]),
        Measure("a Prompt of a list, when the request arrives", "s", times["made"], BARE),
        Measure("its mark, with a publication's first step", "s", times["marked"], BARE),
        Measure("the mark after one generated token", "s", times["longer"], BARE),
    )
    return Topic("marks", f"Marks of a prompt of {TOKENS} tokens", measures)
