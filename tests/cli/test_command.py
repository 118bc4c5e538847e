"""The command without a node server: help, versions, and forbidden imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry._cli.render import safe
from kvferry._summaries import duration, enum_name, ranges, read_state
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.command_line import run_kvferry
from tests.support.node_servers import environment


def test_help_lists_the_commands() -> None:
    command = [sys.executable, "-m", "kvferry._cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment(), "COLUMNS": "120"})
    assert done.returncode == 0
    asking, acting = ("info", "engines", "engine", "requests", "transfers", "health"), ASKING[5:]
    for name in (*asking, *acting, "plan", "doctor"):
        assert f" {name} " in done.stdout


ASKING = ("info", "engines", "engine", "requests", "transfers", "drain", "end-lease", "abort", "evict", "decline")


@pytest.mark.parametrize("command", ASKING)
def test_commands_that_ask_a_server_have_the_same_options(command: str) -> None:
    text = run_kvferry(command, "--help").stdout
    for option in ("--server", "KVFERRY_SERVER", "--json", "--timeout", "--tls-ca", "--tls-cert", "--tls-key"):
        assert option in text
    assert "unix:/run/kvferry/node.sock" in text


@pytest.mark.parametrize(
    "command",
    [
        "",
        "engines",
        "engine",
        "requests",
        "transfers",
        "top",
        "plan",
        "doctor",
        "drain",
        "health",
        "decline",
    ],
)
def test_help_cuts_nothing_off_in_80_columns(command: str) -> None:
    arguments = [sys.executable, "-m", "kvferry._cli", *command.split(), "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**environment(), "COLUMNS": "80"})
    assert done.returncode == 0
    assert "..." not in done.stdout.replace("COMMAND [ARGS]...", "")
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "nixl", "numpy", "grpc", "google.protobuf", "kvferry_server"]
    code = f"import sys, kvferry._cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.97, "10 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranges_of_ranks_are_shortened() -> None:
    assert ranges([0, 1, 2, 3, 6, 8, 9]) == "0-3, 6, 8-9"
    assert ranges([]) == ""


def test_names_of_peers_cannot_control_a_terminal() -> None:
    assert safe("ok ä 世 [bold]") == "ok ä 世 [bold]"
    assert safe("\x1b]0;title\x07\n\u202e") == "\\x1b]0;title\\x07\\n\\u202e"


def test_states_of_a_later_version_are_shown_by_number() -> None:
    assert enum_name(pb.ReadSummary(state=pb.READ_STATE_VALID)) == "valid"
    assert enum_name(pb.ReadSummary(state=99)) == "99"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "shown"), [(0, "waiting"), (1, "waiting, 1 part so far"), (3, "waiting, 3 parts so far")]
)
def test_read_that_waits_for_more_shows_its_parts(parts: int, shown: str) -> None:
    read = pb.ReadSummary(state=pb.READ_STATE_WAITING)
    assert read_state(ipb.TransferSummary(read=read, parts=parts)) == shown
