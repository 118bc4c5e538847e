"""Changes one decision at a time, and checks whether a test fails.

python -m tests.mutation --seed 7 --sample 8 --only kvferry_server

A mutant that survives is a decision that nothing tests: it gets a test, or an entry in `targets.py` that says why it is
no mistake. The files that are mutated are copies: the working tree is not touched.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.targets import TARGETS, Target
from tests.support.repository import ROOT


@dataclass
class Row:
    """The results of a file's mutants."""

    file: str
    all: int
    killed: int = 0
    equivalent: list[Mutant] = field(default_factory=list)
    survived: list[Mutant] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Mutants of the sample."""
        return self.killed + len(self.equivalent) + len(self.survived)


class Copy:
    """A copy of the packages, in which mutants replace files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for package in ("client/kvferry", "server/kvferry_server"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))

    def passes(self, tests: Sequence[str], timeout: float, python: str = sys.executable) -> bool:
        """Whether these tests pass with what is in the copy; tests that take longer have failed."""
        paths = [str(self._folder / part) for part in ("client", "server")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        # Only the exit status counts.
        environment["KVFERRY_SHRINK"] = "0"
        environment["KVFERRY_EXAMPLES"] = "full"
        # Warnings are errors in our own environment only, as in `make test-vllm`.
        options = [] if python == sys.executable else ["-W", "ignore"]
        options += ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--basetemp", str(self._folder / "tmp")]
        process = subprocess.Popen(
            [python, "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            # The child processes, too.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def notices(self, file: str, mutant: Mutant, stages: Sequence[tuple[Sequence[str], float]], python: str) -> bool:
        """Whether a test fails with the mutant in its file's place."""
        place = self._folder / file
        original = place.read_text()
        place.write_text(mutant.source)
        try:
            return not all(self.passes(tests, timeout, python) for tests, timeout in stages)
        finally:
            place.write_text(original)


def python_of(target: Target) -> str | None:
    """Return the Python for a target's tests; None: its environment is not set up."""
    if target.environment == Target.environment:
        return sys.executable
    python = ROOT / target.environment / "bin" / "python"
    return str(python) if python.exists() else None


def limits(copy: Copy, stages: Sequence[Sequence[str]], python: str) -> list[tuple[Sequence[str], float]]:
    """Return each stage with the most seconds of a mutant: several times those of the original."""
    found = []
    for tests in stages:
        began = time.monotonic()
        if not copy.passes(tests, 600, python):
            raise SystemExit(f"without any mutant, {' '.join(tests)} fails")
        found.append((tests, 20 + 3 * (time.monotonic() - began)))
    return found


def row(copy: Copy, file: str, target: Target, python: str, turns: random.Random, sample: int, until: float) -> Row:
    """Try a sample of a file's mutants, as long as there is time."""
    made = mutants((ROOT / file).read_text())
    result = Row(file, len(made))
    stages = limits(copy, target.stages, python)
    for mutant in turns.sample(made, min(sample, len(made))):
        if time.monotonic() > until:
            break
        if mutant.name in target.equivalent:
            result.equivalent.append(mutant)
        elif copy.notices(file, mutant, stages, python):
            result.killed += 1
        else:
            result.survived.append(mutant)
            print(f"survived: {file}:{mutant.line} {mutant.name}", flush=True)
    return result


def table(rows: Sequence[Row]) -> str:
    """Return the results in Markdown."""
    lines = ["| file | mutants | tried | killed | survived | equivalent |", "|---|--:|--:|--:|--:|--:|"]
    for one in rows:
        counts = one.all, one.tried, one.killed, len(one.survived), len(one.equivalent)
        lines.append(f"| `{one.file}` | {' | '.join(map(str, counts))} |")
    for one in rows:
        reasons = TARGETS[one.file].equivalent
        lines += ["", *(f"- survived: `{one.file}:{mutant.line}` `{mutant.name}`" for mutant in one.survived)]
        lines += [f"- equivalent: `{one.file}` `{found.name}`: {reasons[found.name]}" for found in one.equivalent]
    return "\n".join(line for index, line in enumerate(lines) if line or lines[index - 1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--sample", type=int, default=10, help="mutants per file")
    parser.add_argument("--only", default="", help="files whose path has this in it; several with commas")
    parser.add_argument("--minutes", type=float, default=24 * 60)
    arguments = parser.parse_args()
    print(f"mutate: seed {arguments.seed}, {arguments.sample} mutants per file", flush=True)
    wanted = arguments.only.split(",")
    until, rows = time.monotonic() + 60 * arguments.minutes, []
    with tempfile.TemporaryDirectory(prefix="kvferry-mutate-") as folder:
        copy = Copy(Path(folder))
        for file, target in TARGETS.items():
            if any(part in file for part in wanted) and time.monotonic() < until:
                python = python_of(target)
                if python is None:
                    print(f"{file}: not tried, there is no {target.environment}", flush=True)
                    continue
                turns = random.Random(f"{arguments.seed} {file}")
                rows.append(row(copy, file, target, python, turns, arguments.sample, until))
                print(f"{file}: {rows[-1].killed} of {rows[-1].tried} killed", flush=True)
    print(table(rows))
    return 1 if any(one.survived for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
