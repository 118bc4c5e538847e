"""What `kvferry fetch` refuses before it asks anybody."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvferry import router_reference
from tests.support.command_line import run_kvferry

ENGINE = "prefill@home.example:7423"
SECRET = router_reference("home.example:7423", "prefill")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([ENGINE, "--output", "kv"], "either token ids or --tokens"),
        ([ENGINE, "1", "--tokens", "ids", "--output", "kv"], "either token ids or --tokens"),
        ([ENGINE, "--tokens", "missing", "--output", "kv"], "cannot read missing"),
        ([ENGINE, "1", "two", "--output", "kv"], "'two'"),
        ([ENGINE, "4294967296", "--output", "kv"], "4294967295"),
        ([ENGINE, "1", "--output", "missing/kv"], "cannot write missing/kv"),
        ([ENGINE, "1", "--output", "."], "cannot write ."),
        ([ENGINE, "1", "--output", "n" * 300], "cannot write"),
        ([ENGINE, "1"], "--output"),
        ([ENGINE, "1", "--first-token", "1", "--output", "kv"], "has 1 tokens"),
        (["prefill", "1", "--output", "kv"], "names no home"),
        (["@home.example:7423", "1", "--output", "kv"], "engine_id"),
        (["prefill@unix:/run/node.sock", "1", "--output", "kv"], "host:port"),
        (["kvf1e.nonsense", "1", "--output", "kv"], "not a kvferry reference"),
        ([SECRET, "1", "--output", "kv"], "names no home"),
    ],
)
def test_fetch_refuses_what_it_cannot_ask(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_kvferry("fetch", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    # Arguments may be secrets.
    assert SECRET not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_fetch_takes_the_place_of_a_file_only(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "kv"
    if kind == "pipe":
        os.mkfifo(output)
    else:
        output.symlink_to(os.devnull)
    before = output.lstat()
    done = run_kvferry("fetch", ENGINE, "1", "--output", str(output))
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert output.lstat() == before


def test_fetch_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    done = run_kvferry("fetch", ENGINE, "1", "--output", str(tmp_path / "kv"))
    assert done.returncode == 2
    assert "pip install 'kvferry[fetch,nixl]'" in done.stderr


def test_fetch_from_a_home_that_is_away_is_one_line(tmp_path: Path) -> None:
    done = run_kvferry("fetch", "prefill@127.0.0.1:1", "1", "--output", str(tmp_path / "kv"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1:1" in line
