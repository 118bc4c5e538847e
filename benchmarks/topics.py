"""The topics of the suite, and how one is run: in a process of its own, so that nothing of one stays for the next.

`python -m benchmarks.topics TOPIC EFFORT FILE` runs one, and writes what it found into the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measures import FULL, SMOKE, Effort, Measure, Topic
from benchmarks.results import TopicResult

TOPICS = (
    "small_reads",
    "server_calls",
    "large_reads",
    "pages",
    "tcp_reads",
    "paths",
    "tcp_paths",
    "handshakes",
    "engine_steps",
    "marks",
    "spinning",
    "first_reads",
    "fleet",
    "lengths",
    "integrity",
    "expand",
    "homes",
    "limits",
    "vllm_worker",
    "mooncake",
)
"""Modules of this package, each with a function `run`."""

BESIDE_VLLM = ("vllm_worker",)
"""Those that run in vLLM's environment."""

PEERS = {"mooncake": "mooncake.engine"}
"""Modules of others that topics compare with, of `kvferry[bench]`."""

VLLM_PYTHON = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"


def missing(name: str) -> str:
    """Why a topic cannot run here; empty if it can."""
    if name in BESIDE_VLLM and not (find_spec("vllm") or VLLM_PYTHON.exists()):
        return "vLLM is not set up here: make .venv-vllm/.installed"
    peer = PEERS.get(name)
    if peer is not None and not _installed(peer):
        return f"{peer} is not installed here: kvferry[bench], and Debian's libibverbs1 librdmacm1 libnuma1 liburing2"
    return ""


def _installed(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def _python_for(name: str) -> str:
    """The Python that a topic runs with."""
    return sys.executable if name not in BESIDE_VLLM or find_spec("vllm") else str(VLLM_PYTHON)


def measured(name: str, effort: Effort) -> TopicResult:
    """Run one topic in a new process; raises `subprocess.CalledProcessError` if it fails."""
    before, began = os.getloadavg()[0], time.monotonic()
    with tempfile.NamedTemporaryFile() as found:
        command = [_python_for(name), "-m", "benchmarks.topics", name, "smoke" if effort.smoke else "full", found.name]
        subprocess.run(command, check=True)
        topic = parsed(Path(found.name).read_text())
    return TopicResult.of(topic, (round(before, 2), round(os.getloadavg()[0], 2)), time.monotonic() - began)


def run_topic(name: str, effort: Effort) -> Topic:
    """Run one topic in this process."""
    topic: Topic = import_module(f"benchmarks.{name}").run(effort)
    return topic


def parsed(text: str) -> Topic:
    """A topic from JSON."""
    given = json.loads(text)
    measures = tuple(Measure(**{**measure, "samples": tuple(measure["samples"])}) for measure in given["measures"])
    return Topic(given["name"], given["title"], measures)


def main() -> None:
    """Run the topic of the command line."""
    name, effort, file = sys.argv[1:]
    Path(file).write_text(json.dumps(asdict(run_topic(name, SMOKE if effort == "smoke" else FULL))))


if __name__ == "__main__":
    main()
