"""`kvferry plan` over geometry files: whatever a file can say of an engine, another engine's ranks can read, each byte
once."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry._cli import app
from kvferry.geometry import EngineGeometry, GroupKind
from kvferry.geometry import file as geometry_file
from tests.support.repository import EXAMPLES

Change = dict[str, Any]

# What differs, the file of the source, and the file of the destination or how it differs from the source's.
PAIRS: dict[str, tuple[str, str | Change]] = {
    "fewer ranks": ("llama3-8b-tp4", "llama3-8b-tp2"),
    "sizes that do not divide": ("llama3-8b-tp4", "llama3-8b-tp3"),
    "uneven heads": ("ten-heads-tp4", {"tp_size": 3, "shards": [[0, 1], [1, 5], [5, 10]]}),
    "replicas at the source": ("llama3-8b-tp16", "llama3-8b-tp3"),
    "replicas at the destination": ("llama3-8b-tp3", "llama3-8b-tp16"),
    "stages": ("llama3-70b-tp4-pp2", {"tp_size": 2, "pp_size": 4, "stages": None}),
    "layout and block size": ("llama3-8b-tp2-nhd-64", "llama3-8b-tp4"),
    "block size the other way": ("llama3-8b-tp4", "llama3-8b-tp2-nhd-64"),
    "block sizes that do not divide": ("llama3-8b-tp4", {"tp_size": 2, "block_size": 48, "layout": "NHD"}),
    "K and V side by side in a head": ("llama3-8b-tp4", {"kv": "packed"}),
    "one tensor for all layers, and padding": ("llama3-8b-tp4-cross-layer", "llama3-8b-tp2-padded"),
    "pages in another ratio": ("llama3-8b-tp2-padded", {"block_size": 96, "page_size": 32}),
    "windows in a pool": ("gemma3-27b-tp4", {"tp_size": 8, "block_size": 32}),
    "compressed states, indexers and a draft": ("sparse-mla-tp4", {"tp_size": 1, "num_blocks": 128}),
    "states by channel and by head": ("mamba-hybrid-tp2", "mamba-hybrid-tp1-channels-first"),
    "states of q, k and v": ("qwen3-next-80b-tp4", {"tp_size": 2}),
    "sharded tokens at the destination": ("deepseek-v3-tp8", "deepseek-v3-dcp8"),
    "sharded tokens at the source": ("deepseek-v3-dcp8", "deepseek-v3-tp8"),
    "sharded tokens of heads": ("llama3-8b-tp8-dcp2", "llama3-8b-tp4"),
    "sharded tokens on both sides": (
        "llama3-8b-tp8-dcp2",
        {"tp_size": 4, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
    ),
    "scales beside values": ("fp8-scales-tp2", {"tp_size": 4, "kv": "apart"}),
    "pages that move whole": ("opaque-tp2", {"num_blocks": 64}),
    "a format that divides by head": ("vllm-cpu-tp2", {"tp_size": 1}),
}


def test_refusal_has_a_line_for_each_reason_and_not_for_each_layer() -> None:
    source, destination = (str(EXAMPLES / f"{name}.json") for name in ("llama3-8b-tp2", "ten-heads-tp4"))
    result = CliRunner().invoke(app, ["plan", "--source", source, "--destination", destination])
    assert result.exit_code == 2
    first, *reasons = result.stderr.splitlines()
    assert first == "kvferry: the destination cannot read the source's cache:"
    assert len(reasons) == 4
    assert sum("dtype is bfloat16 at the source" in reason and "47 more alike" in reason for reason in reasons) == 1


def test_picture_in_the_docs_is_the_commands_output(tmp_path: Path) -> None:
    source, destination = (str(EXAMPLES / f"llama3-8b-{name}.json") for name in ("tp3", "tp2"))
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(app, ["plan", "--source", source, "--destination", destination, "--svg", str(drawn)])
    assert result.exit_code == 0
    assert drawn.read_text() == (EXAMPLES.parents[1] / "docs" / "plan.svg").read_text()


def write(folder: Path, source: str, change: str | Change) -> Path:
    """The destination's file."""
    if isinstance(change, str):
        return EXAMPLES / f"{change}.json"
    document = json.loads((EXAMPLES / f"{source}.json").read_text())
    path = folder / "destination.json"
    path.write_text(json.dumps({k: v for k, v in {**document, **change}.items() if v is not None}))
    return path


def plan(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def held(engine: EngineGeometry) -> tuple[Fraction, int]:
    """Bytes that all ranks hold: of a token, and of a request's states."""
    per_token, per_request = Fraction(0), 0
    for _, plane in engine.planes():
        if engine.group(plane.group).kind is GroupKind.STATE:
            per_request += plane.bytes_per_block
        else:
            per_token += len(plane.units) * plane.state_bytes / plane.tokens_per_state / plane.token_shard.count
    return per_token, per_request


@pytest.mark.parametrize("name", PAIRS)
def test_differences_of_every_kind_are_planned_from_files_and_read_every_byte_once(tmp_path: Path, name: str) -> None:
    source, change = PAIRS[name]
    path = write(tmp_path, source, change)
    found = plan("--source", str(EXAMPLES / f"{source}.json"), "--destination", str(path))
    per_token, per_request = held(geometry_file.load(path))
    totals = found["totals"]
    # Averages over all tokens, because shares of stripes are rounded.
    assert totals["bytes_per_token"] == pytest.approx(float(per_token), rel=1e-6)
    assert totals["bytes_per_request"] == per_request
    assert [rank["uncovered"] for rank in found["ranks"]] == [[]] * len(found["ranks"])


def test_live_engine_given_as_a_file_gets_an_error_with_the_right_option() -> None:
    path = str(EXAMPLES / "llama3-8b-tp4.json")
    result = CliRunner().invoke(app, ["plan", "--source", "prefill-0@node7:7423", "--destination", path])
    assert result.exit_code == 2
    assert "--source-engine prefill-0@node7:7423" in " ".join(result.output.split())


def test_engines_of_different_models_are_refused() -> None:
    large, small = (str(EXAMPLES / name) for name in ("llama3-70b-tp4-pp2.json", "llama3-8b-tp2.json"))
    result = CliRunner().invoke(app, ["plan", "--source", large, "--destination", small])
    assert result.exit_code == 2
    assert "'model' is 'meta-llama/Meta-Llama-3-70B' at the source" in result.stderr
