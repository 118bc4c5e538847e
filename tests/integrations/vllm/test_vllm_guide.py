"""The ten commands of docs/vllm.md, as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.guides import Followed, added, check_installed, commands
from tests.support.node_servers import free_port
from tests.support.repository import ROOT
from tests.support.sglang_engines import add_tokenizer
from tests.support.vllm_engines import installed, make_model

PAGE = "docs/vllm.md"
FILES = "examples/vllm"


@pytest.mark.timeout(1500)
def test_commands_of_the_guide_move_a_request(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=2)
    add_tokenizer(model)
    run, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    for name in ("prefill.json", "decode.json"):
        (files / name).write_text((ROOT / FILES / name).read_text().replace("/run/kvferry", str(run)))
    instead = {
        "MODEL": str(model),
        "/run/kvferry": str(run),
        FILES: str(files),
        **{port: str(free_port()) for port in ("8000", "8100", "8200")},
    }
    more = {"vllm serve": added(PAGE, "--dtype"), "vllm-router": ["--prometheus-port", str(free_port())]}
    environment = {name: value for name, value in installed().items() if "MULTIPROCESSING" not in name}
    environment["KVFERRYD_LISTEN"] = "127.0.0.1:0"
    with Followed(PAGE, tmp_path, instead, more, environment) as followed:
        printed = followed.follow({"/v1/completions": answered, "/metrics": has_read})
        answer = json.loads(next(said for command, said in printed.items() if "/v1/completions" in command))
        assert answer["usage"]["completion_tokens"] > 0
        decode = followed.log("decode.json")
    # vLLM has taken the policy from where it stands in the file.
    assert "kv_load_failure_policy='recompute'" in decode
    # kvferry's lines have a level, a time and the name of the process.
    assert re.search(r"\((Worker|EngineCore)[^)]*pid=\d+\) .*INFO \d\d-\d\d \d\d:\d\d:\d\d .*self-check: ", decode)


def answered(said: str) -> bool:
    return '"choices"' in said


def has_read(said: str) -> bool:
    return bool(re.search(r"^vllm:kvferry_read_total\{.*\} [1-9]", said, re.MULTILINE))


def test_guide_installs_the_versions_of_the_tests() -> None:
    for command in commands(PAGE):
        if command.startswith("pip "):
            check_installed(command)
    script = re.search(r"`scripts/setup_vllm\.sh ([\d.]+) \S+`", (ROOT / PAGE).read_text())
    newest = re.search(r"^NEWEST_VLLM := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert script is not None
    assert newest is not None
    assert script.group(1) == newest.group(1)
