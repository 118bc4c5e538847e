"""`kvferry plan`: files, live engines, and the errors of pairs that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from kvferry._cli import app
from kvferry._wire.geometry_codec import engine_to_proto
from kvferry.v1 import introspection_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionServicer, add_IntrospectionServicer_to_server
from tests.support.geometries import engine, tensors

LLAMA = {"layers": 4, "kv_heads": 8, "head_dim": 16, "dtype": "bfloat16", "attention": "gqa"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Geometry files: TP 4 to TP 2, and another model."""
    found = {}
    for name, tp, model in (("p", 4, LLAMA), ("d", 2, LLAMA), ("other", 2, {**LLAMA, "dtype": "float32"})):
        path = tmp_path / f"{name}.json"
        document = {
            "engine_id": name,
            "tp_size": tp,
            "layout": "HND",
            "block_size": 16,
            "num_blocks": 8,
            "model": model,
        }
        path.write_text(json.dumps(document))
        found[name] = str(path)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_text_names_every_read_and_the_totals(files: dict[str, str]) -> None:
    result = run("--source", files["p"], "--destination", files["d"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split()[:7] == ["1", "tp0", "pp0", "tp0", "pp0", "full", "0-3"]
    assert "total        4 reads, 2,048 B/token" in lines


def test_impossible_pair_exits_with_2_and_the_reason(files: dict[str, str]) -> None:
    result = run("--source", files["p"], "--destination", files["other"], "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["reason"] == "INCOMPATIBLE"
    assert {m["field"] for m in error["mismatches"]} >= {"dtype"}
    found = next(m for m in error["mismatches"] if m["field"] == "dtype")
    assert (found["source"], found["destination"]) == ("bfloat16", "float32")


def test_impossible_pair_shows_people_every_reason(files: dict[str, str]) -> None:
    result = run("--source", files["p"], "--destination", files["other"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "dtype is bfloat16 at the source (rank 0), float32 at the destination" in result.stderr


def test_missing_geometry_file_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    result = run("--source", str(tmp_path / "absent.json"), "--destination", files["d"], "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["reason"] == "INVALID_FIELD"


@pytest.mark.parametrize("arguments", [[], ["--source-engine", "p@host:1", "--source", "a.json"]])
def test_engine_given_twice_or_not_at_all_is_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_picture_is_written(files: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert run("--source", files["p"], "--destination", files["d"], "--svg", str(picture)).exit_code == 0
    assert picture.read_text().startswith("<svg")
    result = run("--source", files["p"], "--destination", files["d"], "--svg", str(tmp_path / "no" / "plan.svg"))
    assert result.exit_code == 2


class OneEngine(IntrospectionServicer):
    """A node server with one engine."""

    def __init__(self, missing: list[int]) -> None:
        self.missing = missing

    def GetEngine(self, request: pb.GetEngineRequest, context: grpc.ServicerContext) -> pb.GetEngineResponse:
        geometry = engine("live", tensors(layers=2, axis=8), 4).geometry()
        summary = pb.EngineSummary(num_ranks=4, missing_ranks=self.missing, num_missing=len(self.missing))
        return pb.GetEngineResponse(summary=summary, geometry=engine_to_proto(geometry))


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Iterator[str]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        servicer = OneEngine(getattr(request, "param", []))  # type: ignore[abstract]  # The other calls stay unanswered.
        add_IntrospectionServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"live@127.0.0.1:{port}"
        server.stop(None).wait()


def test_live_engines_are_planned_the_same(live: str) -> None:
    result = run("--source-engine", live, "--destination-engine", live, "--json")
    assert result.exit_code == 0
    assert [len(rank["reads"]) for rank in json.loads(result.stdout)["ranks"]] == [1, 1, 1, 1]


@pytest.mark.parametrize("live", [[2, 3]], indirect=True)
def test_incomplete_engine_is_not_planned(live: str) -> None:
    result = run("--source-engine", live, "--destination-engine", live)
    assert result.exit_code != 0
    assert "ranks [2, 3] have not registered" in str(result.exception)


def test_address_that_is_malformed_is_wrong_usage() -> None:
    result = run("--source-engine", "nowhere", "--destination-engine", "d@127.0.0.1:1")
    assert result.exit_code == 2
    assert "not ID@ADDRESS" in result.output
