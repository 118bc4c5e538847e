"""`kvferry top` on a terminal, in a pipe, and for programs, while node servers come and go."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry._cli.render import console
from kvferry._cli.top import Look, Peers, Screen, busiest, most_pressing, print_looks
from kvferry._clock import now, to_duration
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.cli.conftest import READER, SOURCE, Run, Stage
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd, NodeServerProcess, environment
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "kvferry._cli", "top", "--interval", "0.5"]


class Terminal:
    """A command on a separate terminal."""

    def __init__(self, *arguments: str, rows: int = 40, columns: int = 120) -> None:
        self._master, slave = pty.openpty()
        self._resize(slave, rows, columns)
        # The first terminal that the leader of a session opens controls the session. A shell opens the terminal,
        # because a process with gRPC's threads must not run Python code between fork and exec.
        self.process = subprocess.Popen(
            # A background job of a script ignores Ctrl-C, and so would its children.
            [
                "env",
                "--default-signal=INT",
                "sh",
                "-c",
                'exec "$@" <>"$0" >&0 2>&0',
                os.ttyname(slave),
                *COMMAND,
                *arguments,
            ],
            start_new_session=True,
            env=environment(TERM="xterm", NO_COLOR="1"),
        )
        os.close(slave)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        self._resize(self._master, rows, columns)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def shows(self, *texts: str, after: int = 0) -> None:
        """Wait until all these texts were drawn after so many characters."""
        until(lambda: self._read() and all(text in self.seen[after:] for text in texts))

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        end = now() + 30
        while self.process.poll() is None and now() < end:
            self._read()
        self._read()
        return self.process.wait(1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                break
        return True

    @staticmethod
    def _resize(file: int, rows: int, columns: int) -> None:
        fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def watching(stage: Stage) -> Iterator[Terminal]:
    made = Terminal("--server", stage.server.address)
    yield made
    made.close()


def test_top_prints_one_look_as_json(kvferry: Run, stage: Stage) -> None:
    done = kvferry("top", "--once", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (server,) = found["servers"]
    assert server == {
        "server": stage.server.address,
        "error": "",
        "restarted": False,
        "recovering": False,
        "engines": 2,
        "publications": 1,
        "leases": 1,
        "bytes_per_second": None,
        "whole": True,
    }
    assert found["peers"] == [
        {
            "server": stage.server.address,
            "source": SOURCE,
            "reader": READER,
            "reading": 1,
            "ended": 0,
            "bytes": 150_000,
            "rate": None,
        }
    ]
    (read,) = found["transfers"]
    assert (read["server"], read["publication"], read["request_id"]) == (stage.server.address, "7", "cmpl-7")
    assert (read["read"]["reported"], read["read"]["parties"], read["read"]["bytes"]) == (1, 4, "150000")
    assert read["lease_remaining"] > "0"


def test_top_prints_one_look_as_tables(kvferry: Run, stage: Stage) -> None:
    printed = kvferry("top", "--once").stdout
    assert re.search(rf"{re.escape(stage.server.address)} +2 +1 +1 +- +ok", printed)
    assert re.search(rf"{SOURCE} +{READER} +1 +0 +150.0 kB +-", printed)
    assert "cmpl-7" in printed


def test_top_says_of_a_server_that_it_waits_for_its_engines(empty: Kvferryd) -> None:
    printed = run_kvferry("top", "--once", "--server", empty.address).stdout
    assert re.search(rf"{re.escape(empty.address)} +0 +0 +0 .* recovering", printed)
    (server,) = json.loads(run_kvferry("top", "--once", "--json", "--server", empty.address).stdout)["servers"]
    assert server["recovering"] is True
    assert "recovering" in "\n".join(drawn([Look("s", recovering=True)], 30))


def test_top_shows_several_servers_and_the_error_of_a_missing_one(
    stage: Stage, empty: Kvferryd, tmp_path: Path
) -> None:
    gone = f"unix:{tmp_path}/none.sock"
    servers = [part for server in (stage.server.address, empty.address, gone) for part in ("--server", server)]
    done = run_kvferry("top", "--once", "--json", *servers)
    assert done.returncode == 1
    found = {server["server"]: server for server in json.loads(done.stdout)["servers"]}
    assert [found[name]["leases"] for name in (stage.server.address, empty.address)] == [1, 0]
    assert "none.sock" in found[gone]["error"]
    # The environment can name the server, too.
    both = run_kvferry("top", "--once", "--json", KVFERRY_SERVER=f"{stage.server.address} {empty.address}")
    assert (both.returncode, len(json.loads(both.stdout)["servers"])) == (0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--interval", "0.1"],
        ["--interval", "nan"],
        ["--interval", "inf"],
        ["--server", "nonsense"],
        ["--tls-cert", "/nowhere"],
    ],
)
def test_wrong_usage_is_exit_code_2(wrong: list[str]) -> None:
    done = run_kvferry("top", "--once", *wrong)
    assert (done.returncode, done.stdout) == (2, "")


def test_screen_follows_the_terminals_size_and_ctrl_c_ends_it(watching: Terminal) -> None:
    watching.shows("Node servers", "Peers", "Reads", SOURCE, "cmpl-7", "0 bytes/s")
    before = len(watching.seen)
    watching.resize(9, 60)
    watching.shows("Node servers", after=before)
    # The first frame that is small enough: the servers come first.
    after = len(watching.seen)
    watching.shows("Node servers", after=after)
    frame = watching.seen[after:]
    assert "cmpl-7" not in frame
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).splitlines()) <= 60
    watching.type(b"\x03")
    assert watching.end() == 130
    # The command restores the terminal's screen and cursor, and prints nothing more.
    assert watching.seen.rindex("\x1b[?1049l") > watching.seen.rindex("\x1b[?1049h")
    assert "\x1b[?25h" in watching.seen
    assert "Traceback" not in watching.seen


def test_sigterm_restores_the_terminals_screen(watching: Terminal) -> None:
    watching.shows("Reads")
    watching.process.send_signal(signal.SIGTERM)
    assert watching.end() == 143
    assert watching.seen.rindex("\x1b[?1049l") > watching.seen.rindex("\x1b[?1049h")


def test_restart_of_a_node_server_is_shown(tmp_path: Path) -> None:
    with (
        NodeServerProcess(tmp_path, drain=0) as server,
        subprocess.Popen(
            [*COMMAND, "--json", "--server", server.address], stdout=subprocess.PIPE, text=True, env=environment()
        ) as process,
    ):

        def look() -> Any:
            assert process.stdout is not None
            return json.loads(process.stdout.readline())["servers"][0]

        assert look()["error"] == ""
        server.stop()
        while not look()["error"]:
            pass
        server.start()
        while (found := look())["error"]:
            pass
        assert found["restarted"]
        assert not look()["restarted"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_output_may_be_closed_early(empty: Kvferryd) -> None:
    with subprocess.Popen(
        [*COMMAND, "--server", empty.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert "kvferry top" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


# Many reads, without a server.


def read_of(number: int, size: int = 0, remaining: float = 10.0) -> ipb.TransferSummary:
    return ipb.TransferSummary(
        source=pb.EngineRef(engine_id="prefill"),
        publication=number,
        request_id=f"request {number}",
        read=pb.ReadSummary(
            reader=pb.EngineRef(engine_id="decode"),
            lease_number=number,
            state=pb.READ_STATE_READING,
            parties=1,
            bytes=size,
        ),
        lease_remaining=to_duration(remaining),
    )


def drawn(looks: list[Look], height: int) -> list[str]:
    out = console()
    with out.capture() as capture:
        out.print(Screen("", looks), height=height)
    return [line for line in capture.get().splitlines() if line.strip()]


def test_reads_whose_leases_end_first_come_first_then_the_waiting_then_the_ended() -> None:
    waiting = [ipb.TransferSummary(router_key=f"room-{seconds}", waited=to_duration(seconds)) for seconds in (3.0, 7.0)]
    reads = [read_of(1, remaining=0.0), *waiting, read_of(2, 900, 29.0), read_of(3, remaining=4.5), read_of(4, 5, 0.0)]
    look = Look("s", engines=2, leases=2, transfers=reads, whole=True)
    pressing = [read.publication or read.router_key for _, read in most_pressing([look])]
    assert pressing == [3, 2, "room-7.0", "room-3.0", 4, 1]
    text = "\n".join(drawn([look], 30))
    assert "router key room-7.0" in text
    assert "waits for 7.0 s" in text


def test_reads_in_thousands_are_cut_to_those_that_end_first_with_the_number_of_the_others() -> None:
    reads = [read_of(number, remaining=2.0 if number == 17 else 30.0) for number in range(5000)]
    reads.append(read_of(6000, size=5000, remaining=0.0))
    look = Look(
        "s", engines=2, leases=9000, transfers=reads, whole=False, peers=[Peers("prefill", "decode", 5000, rate=3.0)]
    )
    assert [read.publication for _, read in most_pressing([look])[:3]] == [17, 4999, 4998]
    lines = drawn([look], 30)
    assert len(lines) <= 30
    text = "\n".join(lines)
    shown = re.findall(r"request (\d+)", text)
    assert shown[:2] == ["17", "4999"]
    assert f"and {9000 - len(shown)} more" in text
    assert "at least 3 bytes/s" in text


@pytest.mark.parametrize("height", [1, 2, 5, 9, 12, 20, 50])
def test_top_fits_any_terminal(height: int) -> None:
    looks = [
        Look(
            f"server {number} {'with a long name ' * 30}",
            peers=[Peers("p", f"d{number}", 1, rate=float(number))],
            transfers=[read_of(number)],
        )
        for number in range(30)
    ]
    lines = drawn(looks, height)
    assert "kvferry top" in lines[0]
    assert len(lines) <= max(height, 6)


def test_busiest_pairs_come_first() -> None:
    looks = [
        Look("a", peers=[Peers("p", "idle"), Peers("p", "busy", rate=2.0)]),
        Look("b", peers=[Peers("p", "more", rate=3.0)]),
    ]
    assert [peers.reader for _, peers in busiest(looks)] == ["more", "busy", "idle"]


def test_names_of_peers_cannot_control_the_terminal() -> None:
    look = Look("s", peers=[Peers("\x1b[2J", "d", 1)], transfers=[read_of(1)])
    assert "\x1b[2J" not in "\n".join(drawn([look], 40))


def test_a_server_whose_answer_is_no_json_does_not_end_the_look_at_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, good = read_of(2, size=5), read_of(1)
    broken.lease_remaining.seconds = 10**15
    print_looks([Look("bad", transfers=[broken]), Look("good", transfers=[good])])
    # The lease of the broken one ends last.
    first, second = json.loads(capsys.readouterr().out)["transfers"]
    assert (first["server"], first["publication"], second["server"]) == ("good", "1", "bad")
    assert "lease_remaining" in second["error"]
