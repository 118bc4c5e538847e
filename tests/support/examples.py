"""How many examples hypothesis draws of a property: `KVFERRY_EXAMPLES` is `landing`, `full`, or a number for long runs.

`make test` draws few and `make test-slow` draws all, the same ones in every run. A long run draws so many times all of
them, from another seed every time: `KVFERRY_EXAMPLES=20 pytest tests/planner`.
"""

from __future__ import annotations

import os

ASKED = os.environ.get("KVFERRY_EXAMPLES", "landing")
SAME = ASKED in ("landing", "full")
"""Whether every run draws the same examples."""
LANDING = 0.2
"""The part of all examples that `make test` draws."""


def examples(full: int) -> int:
    """How many to draw of a property that has so many examples in `make test-slow`."""
    times = {"landing": LANDING, "full": 1.0}.get(ASKED) or float(ASKED)
    return max(1, round(full * times))
