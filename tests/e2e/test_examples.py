"""What the README shows works."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_example_that_runs() -> None:
    example = (ROOT / "examples" / "one_process.py").read_text()
    body = example[example.index("import numpy") : example.index("\n\nif __name__")]
    assert body in (ROOT / "README.md").read_text()


def test_example_in_one_process_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "one_process.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["moved 655360 bytes in 80 descriptors", "request-1 was released: READ"]
    assert done.stderr == ""
