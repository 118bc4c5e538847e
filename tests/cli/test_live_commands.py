"""The commands' output about a live node server, for people and for programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry._cli.connection import Node
from kvferry.v1 import introspection_pb2 as ipb
from tests.cli.conftest import CACHE_BYTES, READER, SOURCE, Run, Stage
from tests.support.certificates import Authority, tls_flags
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The cells of a table."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip() and not set(line.strip()) <= set("─ ━-")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_engines_as_a_table(kvferry: Run, stage: Stage) -> None:
    table = rows(kvferry("engines"))
    assert table[0] == ["Engine", "Incarnation", "State", "Ranks", "Requests", "Leases", "Cache"]
    (source,) = [row for row in table if row[0] == SOURCE]
    assert source[1:6] == [stage.incarnation.hex()[:8], "ready", "2/2", "1", "1"]


def test_engines_as_json(kvferry: Run, stage: Stage) -> None:
    found = answer(kvferry("engines", "--json"))
    assert set(found) == {"home_epoch", "engines", "recovering"}
    assert found["recovering"] is False
    (source,) = [engine for engine in found["engines"] if engine["engine"]["engine_id"] == SOURCE]
    assert source == {
        "engine": {"engine_id": SOURCE, "incarnation": stage.incarnation.hex()},
        "state": "ENGINE_STATE_READY",
        "num_ranks": 2,
        "missing_ranks": [],
        "publications": "1",
        "leases": "1",
        "cache_bytes": str(CACHE_BYTES),
        "num_missing": 0,
    }


def test_engine_command_shows_one_engine(kvferry: Run, stage: Stage) -> None:
    text = kvferry("engine", SOURCE).stdout
    assert stage.incarnation.hex() in text
    for part in ("tiny", "full", "tokens", "tp_rank 1", "key [4, 8) of 8, value [4, 8) of 8", "hnd bfloat16"):
        assert part in text
    found = answer(kvferry("engine", SOURCE, "--json"))
    assert [rank["rank"] for rank in found["geometry"]["ranks"]] == [0, 1]


def test_requests_lists_publications(kvferry: Run, stage: Stage) -> None:
    table = rows(kvferry("requests"))
    assert table[0] == ["Engine", "Publication", "Request", "State", "Blocks", "Reads", "Leases", "Age"]
    assert table[1][:7] == [SOURCE, "7", "cmpl-7", "published", "3", "0/1", "1"]
    (request,) = answer(kvferry("requests", "--json", "--engine", SOURCE))["requests"]
    assert request["marks"] == ["45"]
    assert answer(kvferry("requests", "--json", "--engine", "nobody"))["requests"] == []


def test_transfers_lists_reads(kvferry: Run) -> None:
    table = rows(kvferry("transfers", "--engine", SOURCE))
    header = ["Source", "Publication", "Request", "Reader", "Lease", "State", "Ranks done", "Bytes", "Remaining"]
    assert table[0] == header
    assert table[1][:8] == [SOURCE, "7", "cmpl-7", READER, "1", "reading", "1/4", "150.0 kB"]
    assert table[1][8].endswith(" s")
    (transfer,) = answer(kvferry("transfers", "--json"))["transfers"]
    assert transfer["read"]["state"] == "READ_STATE_READING"
    assert transfer["lease_remaining"].endswith("s")


def test_server_without_engines_prints_a_sentence(empty: Kvferryd) -> None:
    for command, says in (("engines", "No engine"), ("requests", "No request"), ("transfers", "Nothing is read")):
        done = run_kvferry(command, "--server", empty.address)
        assert done.returncode == 0
        sentence, waits = done.stdout.splitlines()
        assert sentence.startswith(says)
        assert waits == f"{empty.address} waits for engines that it had, or for their snapshots: lists may lack some."
        found = answer(run_kvferry(command, "--server", empty.address, "--json"))
        assert (found[command], found["recovering"]) == ([], True)


def test_lists_of_several_pages_say_whether_the_home_waited_during_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home was restarted between two of them."""
    one = [ipb.RequestSummary()]
    pages = iter(
        (
            ipb.ListRequestsResponse(requests=one, next_page_token="1"),
            ipb.ListRequestsResponse(requests=one, next_page_token="2", recovering=True),
            ipb.ListRequestsResponse(requests=one),
        )
    )
    monkeypatch.setattr(Node, "call", lambda *_: next(pages))
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        found = Node("home", channel, None, 1.0, True).listing("requests")
    assert (len(found.requests), found.next_page_token, found.recovering) == (3, "", True)


def test_engines_of_several_servers_say_which_of_them_wait_for_theirs(stage: Stage, empty: Kvferryd) -> None:
    servers = ("--server", stage.server.address, "--server", empty.address)
    lines = run_kvferry("engines", *servers).stdout.splitlines()
    assert [line.split()[0] for line in lines if " waits for " in line] == [empty.address]


def test_option_wins_over_the_environment(kvferry: Run, stage: Stage, empty: Kvferryd) -> None:
    assert answer(kvferry("engines", "--json", "--server", empty.address))["engines"] == []
    assert answer(kvferry("engines", "--json", "--server", stage.server.addresses[1]))["engines"]


@pytest.mark.parametrize("command", [["engines"], ["engine", "x"], ["requests"], ["transfers"]])
def test_missing_server_is_one_line_and_exit_code_1(command: list[str], tmp_path: Path) -> None:
    done = run_kvferry(*command, "--server", f"unix:{tmp_path}/none.sock", "--timeout", "5")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path}/none.sock" in line
    assert "--server" in line


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("nobody", ("[ENGINE_UNKNOWN]", "[HOME_RECOVERING]")),
        # A name that would colour the terminal is invalid, and is shown escaped.
        ("no\x1b[31mbody", ("[INVALID_FIELD]",)),
    ],
)
def test_missing_engine_is_one_line_and_exit_code_1(kvferry: Run, name: str, reasons: tuple[str, ...]) -> None:
    done = kvferry("engine", name)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvferry: ")
    # docs/errors.md has an entry of this name.
    assert line.endswith(reasons)
    assert "\x1b" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["engines", "--server", "nowhere"],
        ["engines", "--tls-cert", "/nowhere.pem", "--server", "127.0.0.1:1"],
        ["engines", "--timeout", "0"],
        ["engines", "--frobnicate"],
        ["engine"],
        ["frobnicate"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = run_kvferry(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_commands_work_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path, "ours")
    flags = tls_flags(authority.issue("node"))
    with Kvferryd("--unix", "", "--listen", "127.0.0.1:0", *flags) as server:
        client = authority.issue("operator")
        done = run_kvferry("engines", "--json", "--server", server.address, *tls_flags(client))
        assert answer(done)["engines"] == []
        env = {"KVFERRY_TLS_CA": str(client.ca), "KVFERRY_TLS_CERT": str(client.cert)}
        done = run_kvferry("engines", "--server", server.address, **env, KVFERRY_TLS_KEY=str(client.key))
        assert done.returncode == 0
        assert run_kvferry("engines", "--server", server.address).returncode == 1
