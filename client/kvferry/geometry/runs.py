"""Runs of consecutive numbers, for block ids and places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def split_runs(
    *columns: npt.NDArray[np.signedinteger[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split positions into runs in which every column rises by one.

    Args:
        columns: ``int[n]`` each.

    Returns:
        First positions and lengths of the runs, ``int64[r]`` each; empty for ``n = 0``.
    """
    count = len(columns[0])
    if count == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = np.zeros(count - 1, np.bool_)
    for column in columns:
        ends |= column[1:] - column[:-1] != 1
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(ends) + 1))
    return starts, np.concatenate((starts[1:], [count])) - starts
