"""Run the suite and write its table: `python -m benchmarks`."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

from benchmarks import control, engines, expand, integrity, paths, transfer

RESULTS = Path(__file__).parent / "RESULTS.md"

HEADER = """# Benchmarks

Written by `make bench`. Ratios from one run on one machine; on a shared machine they move by some tens of percent from
run to run.

"""


def main() -> None:
    """Every benchmark, one after the other."""
    tables = [
        transfer.run(),
        transfer.run("tcp"),
        paths.run(),
        paths.run("tcp"),
        control.run(),
        integrity.run(),
        *engines.run(),
        *expand.run(),
    ]
    text = HEADER + f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}.\n\n"
    text += "\n".join(table.markdown() for table in tables)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
