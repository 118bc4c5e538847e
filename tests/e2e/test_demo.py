"""`make demo`: every byte is checked, and nothing is left behind, also after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.repository import ROOT

MODEL = {"layers": 2, "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16", "attention": "gqa"}
GEOMETRY = {
    "tp_size": 2,
    "pp_size": 1,
    "layout": "HND",
    "block_size": 16,
    "num_blocks": 32,
    "model": MODEL,
}
LARGE = {**GEOMETRY, "num_blocks": 2560, "model": {**MODEL, "layers": 8, "kv_heads": 8, "head_dim": 64}}


def command(
    tmp_path: Path,
    *options: str,
    geometry: Mapping[str, object] = GEOMETRY,
    destination: Mapping[str, object] | None = None,
) -> list[str]:
    files = []
    for name, changes in (("source", {}), ("destination", destination or {})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"engine_id": name, **geometry, **changes}))
        files += [f"--{name}", str(file)]
    return [sys.executable, str(ROOT / "examples" / "demo.py"), *files, *options]


def environment(tmp_path: Path) -> dict[str, str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    # UCX with the defaults that users have: see tests/conftest.py.
    kept = {name: value for name, value in os.environ.items() if name != "UCX_MEM_MMAP_HOOK_MODE"}
    # The demonstration's node servers ignore the settings of the host's.
    return {**kept, "TMPDIR": str(scratch), "KVFERRYD_POLICY": str(scratch / "none")}


def demo(
    tmp_path: Path, *options: str, destination: Mapping[str, object] | None = None
) -> subprocess.CompletedProcess[str]:
    given = command(tmp_path, *options, destination=destination)
    return subprocess.run(given, capture_output=True, text=True, timeout=100, env=environment(tmp_path))


@pytest.mark.parametrize("ucx_tls", ["", pytest.param("tcp", marks=pytest.mark.slow)], ids=["ucx-default", "ucx-tcp"])
def test_demo_moves_and_verifies_every_byte(tmp_path: Path, ucx_tls: str) -> None:
    options = ["--json", "--requests", "3", "--tokens", "60", "--ucx-tls", ucx_tls]
    # The null block is the last block of a cache that the demonstration makes smaller.
    done = demo(tmp_path, *options, destination={"tp_size": 1, "num_blocks": 1024, "null_block": 1023})
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    (rank,) = outcome["ranks"]
    assert [read["source_ranks"] for read in rank["reads"]] == [[0, 1]] * 3
    assert (rank["wrong"], rank["strayed"], outcome["failures"]) == (0, 0, [])
    assert rank["right"] >= outcome["bytes"] > 0
    assert outcome["released"] == 4
    assert list((tmp_path / "scratch").iterdir()) == []


def test_demo_of_an_impossible_pair_shows_the_reason_and_starts_nothing(tmp_path: Path) -> None:
    done = demo(tmp_path, destination={"model": {**MODEL, "kv_heads": 8}})
    assert done.returncode == 2
    assert "axis_size is 4 at the source" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_whose_ranks_cannot_start_shows_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    # Shared memory alone: UCX cannot report the death of peers, and makes no agent.
    done = demo(tmp_path, "--ucx-tls", "sm", "--requests", "1", "--tokens", "20")
    assert done.returncode == 2
    assert "kvferry demo: NIXL createBackend: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        # Enough for several seconds: the demonstration must not end before the interrupt.
        command(tmp_path, "--json", "--requests", "4", "--tokens", "8192", geometry=LARGE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        start_new_session=True,
    )
    assert process.stderr is not None
    # The ranks are there once their source is being filled.
    lines = iter(process.stderr.readline, "")
    assert any("filling" in line for line in lines)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert len(started) >= 4
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    assert list((tmp_path / "scratch").iterdir()) == []
