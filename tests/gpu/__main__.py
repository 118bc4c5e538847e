"""Run the tests of this folder and the measures, and report: ``python -m tests.gpu [--device cuda|cpu] [pytest's
arguments]``.

Exit codes: 0, all is well, or no device was named and there is no GPU; 1, a test failed or something could not be
measured; 3, a GPU was asked for and there is none; others are pytest's.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import pytest
import torch

from tests.gpu.device_facts import facts
from tests.gpu.measure import measure
from tests.gpu.report import Collected, Table, markdown
from tests.support.repository import ROOT

REPORT = ROOT / "docs" / "gpu-report.md"
NO_GPU = 3


def main() -> int:
    """Run everything; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Move KV cache in the memory of a GPU.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="where the caches lie; default: a GPU, if there is one"
    )
    parser.add_argument("--report", type=Path, help="file for the report; default: docs/gpu-report.md, on a GPU only")
    parser.add_argument("--no-measures", action="store_true", help="run the tests alone")
    options, rest = parser.parse_known_args()
    device = options.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        print(
            f"there is no GPU that torch {torch.__version__} (CUDA {built}) can use, so nothing was run",
            file=sys.stderr,
        )
        return NO_GPU if options.device else 0
    collected = Collected()
    code = int(
        pytest.main(["-p", "no:cacheprovider", str(Path(__file__).parent), "--device", device, *rest], [collected])
    )
    measures: list[Table] = []
    problem = ""
    if not options.no_measures:
        try:
            measures = measure("cuda:0" if device == "cuda" else device)
        except Exception:
            problem = traceback.format_exc()
    report = markdown(facts("cuda:0" if device == "cuda" else device), collected.outcomes, measures, problem)
    print(report)
    file = options.report or (REPORT if device == "cuda" else None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(report)
        print(f"the report is in {file}")
    return code or int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
