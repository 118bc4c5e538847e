"""`kvferry plan` by address: engines as they are registered at their node servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvferry import Client, EngineSpec, Group, Interval
from kvferry.geometry.tensors import Holding
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess

HEADS, TOKENS, BLOCKS, CONTENT = 6, 16, 8, 8


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Three engines at a node server: ``p`` of 3 ranks, ``d`` of 2, and ``other``, which computes something else."""
    folder = tmp_path_factory.mktemp("live")
    found = {}
    with ExitStack() as stack:
        server = stack.enter_context(NodeServerProcess(folder, tcp=True))
        for name, ranks, model in (("p", 3, "tiny"), ("d", 2, "tiny"), ("other", 1, "large")):
            client = stack.enter_context(Client(server.address))
            group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
            spec = EngineSpec(unique_id(name), (group,), ranks, {"model": model})
            token = client.open_engine(spec).token
            for rank in range(ranks):
                units = Interval(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
                client.register_cache(
                    spec,
                    rank,
                    tensors={"layers.0": np.zeros((2, BLOCKS, len(units), TOKENS, CONTENT), np.uint8)},
                    axes=("kv", "block", "head", "token", "content"),
                    holding=Holding(units=units, axis_size=HEADS),
                    labels={"tp_rank": rank},
                    token=token,
                    serve=False,
                )
            found[name] = f"{spec.engine_id}@{server.address}"
        yield found


def plan(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry._cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def test_live_engines_are_planned_from_their_registrations(live: dict[str, str]) -> None:
    result = plan("--source-engine", live["p"], "--destination-engine", live["d"], "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    # 3 to 2: rank 0 reads all of source rank 0 and half of rank 1, rank 1 the rest.
    reads = [[(read["source"]["tp_rank"], read["units"]) for read in rank["reads"]] for rank in found["ranks"]]
    assert reads == [[(0, [0, 2]), (1, [2, 3])], [(1, [3, 4]), (2, [4, 6])]]
    assert found["source"] == live["p"].partition("@")[0]
    assert found["totals"]["bytes_per_token"] == 2 * HEADS * CONTENT


def test_plan_has_a_text_and_a_picture(live: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    result = plan("--source-engine", live["p"], "--destination-engine", live["d"], "--svg", str(picture))
    assert result.returncode == 0, result.stderr
    assert "[3, 4)" in result.stdout
    assert picture.read_text().startswith("<svg")


def test_an_impossible_pair_exits_2_and_names_both_values(live: dict[str, str]) -> None:
    result = plan("--source-engine", live["other"], "--destination-engine", live["d"], "--json")
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert error["reason"] == "INCOMPATIBLE"
    assert [(mismatch["field"], mismatch["source"], mismatch["destination"]) for mismatch in error["mismatches"]] == [
        ("model", "large", "tiny")
    ]


def test_unknown_engine_is_named_in_the_error(live: dict[str, str]) -> None:
    address = live["p"].partition("@")[2]
    result = plan("--source-engine", f"nobody@{address}", "--destination-engine", live["d"])
    assert result.returncode not in (0, 2)
    assert "nobody" in result.stderr
