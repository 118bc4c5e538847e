"""The commands of docs/sglang.md, as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.guides import Followed, added, check_installed, commands
from tests.support.node_servers import free_port
from tests.support.repository import ROOT
from tests.support.sglang_engines import ENVIRONMENT, add_tokenizer
from tests.support.vllm_engines import installed, make_model

PAGE = "docs/sglang.md"


@pytest.mark.timeout(1500)
def test_commands_of_the_guide_move_a_request(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=2)
    add_tokenizer(model)
    bootstrap = str(free_port())
    instead = {
        "MODEL": str(model),
        "/run/kvferry": str(tmp_path / "run"),
        "8998": bootstrap,
        **{port: str(free_port()) for port in ("8000", "8100", "8200")},
    }
    more = {
        "sglang serve": [*added(PAGE, "--device cpu"), "--disaggregation-bootstrap-port", bootstrap],
        "sglang_router": ["--prometheus-port", str(free_port())],
    }
    environment = {**installed(), **ENVIRONMENT, "KVFERRYD_LISTEN": "127.0.0.1:0"}
    with Followed(PAGE, tmp_path, instead, more, environment) as followed:
        printed = followed.follow({"/generate": answered, "/metrics": has_read})
        answer = json.loads(next(said for command, said in printed.items() if "/generate" in command))
        assert answer["text"]


def answered(said: str) -> bool:
    return '"text"' in said


def has_read(said: str) -> bool:
    found = re.search(r'^kvferry_reader_reads_total\{(?=[^}]*outcome="done")[^}]*\} ([\d.]+)', said, re.MULTILINE)
    moved = re.search(r"^kvferry_reader_bytes_total\{.*\} ([\d.e+]+)", said, re.MULTILINE)
    return found is not None and float(found.group(1)) >= 1 and moved is not None and float(moved.group(1)) > 0


def test_guide_installs_the_versions_of_the_tests() -> None:
    for command in commands(PAGE):
        if command.startswith("pip "):
            check_installed(command)
    script = re.search(r"`scripts/setup_sglang\.sh ([\d.]+) ([\d.]+) \S+`", (ROOT / PAGE).read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert script is not None
    for name, said in zip(("SGLANG", "NEWEST_VLLM"), script.groups(), strict=True):
        assert f"\n{name} := {said}\n" in makefile
