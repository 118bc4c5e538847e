"""The commands of operators and `kvferry health`, on a live node server."""

from __future__ import annotations

import json
import os
import pty
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry._wire.authority import new_session_secret
from kvferry._wire.channel import connect
from kvferry._wire.reference import router_reference
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.cli.conftest import open_engine, registration
from tests.support.certificates import Authority, tls_flags
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd, environment
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Scene:
    """A node server whose engines are made by the tests, each with one publication."""

    def __init__(self, server: Kvferryd, stub: Any) -> None:
        self.server, self.stub = server, stub

    def engine(self, engine_id: str) -> pb.EngineRef:
        """An engine that has published request ``cmpl-1`` as its publication 1."""
        secret = new_session_secret()
        ref = open_engine(self.stub, engine_id, secret)
        for rank in range(2):
            self.stub.RegisterCache(registration(ref, secret, rank), timeout=10)
        blocks = pb.GroupBlocks(group="full", end_token=48, run_starts=[3], run_counts=[3])
        publish = pb.Publish(publication=1, request_id="cmpl-1", groups=[blocks], last=True)
        sent = pb.NotifyRequest(sender=ref, session_secret=secret, notifications=[pb.Notification(publish=publish)])
        self.reference = self.stub.Notify(sent, timeout=10).results[0].published.reference
        return ref

    def read(self, engine_id: str) -> pb.Accepted:
        """A lease on the last engine's publication."""
        reader = pb.EngineRef(engine_id=engine_id, incarnation=secrets.token_bytes(16))
        request = pb.ReadBlocksRequest(
            reference=self.reference, reader=reader, read_id=secrets.token_bytes(16), parties=1
        )
        accepted: pb.Accepted = self.stub.ReadBlocks(request, timeout=10).accepted
        self.reader = reader
        return accepted

    def report(self, lease_id: bytes, *reports: pb.RankReport) -> None:
        """Report the ends of shares of the last read."""
        done = pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports))
        answer = self.stub.Notify(pb.NotifyRequest(sender=self.reader, notifications=[done]), timeout=10)
        assert answer.results[0].HasField("read_ended"), answer

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_kvferry(*arguments, KVFERRY_SERVER=self.server.address)

    def answer(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    path = tmp_path_factory.mktemp("acting") / "node.sock"
    with ExitStack() as stack:
        server = stack.enter_context(
            Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0", "--drain", "0", "--engine-ttl", "0.01")
        )
        yield Scene(server, KVTransferStub(stack.enter_context(connect(server.address))))


def test_info_shows_version_times_and_limits(scene: Scene) -> None:
    found = scene.answer("info")
    assert found["home_epoch"][:8] == scene.server.epoch
    assert found["advertise"] == scene.server.advertise
    assert found["limits"]["notifications"] == "1024"
    text = scene.run("info").stdout
    for part in (found["version"], found["home_epoch"], "serving", "uptime", "decline_forwarding", "max_streams"):
        assert part in text


def test_ids_are_hexadecimal_everywhere(scene: Scene) -> None:
    ref = scene.engine("hex")
    listed = {one["engine"]["engine_id"]: one["engine"]["incarnation"] for one in scene.answer("engines")["engines"]}
    assert listed["hex"] == ref.incarnation.hex()
    found = scene.answer("engine", "hex")
    assert found["geometry"]["incarnation"] == found["summary"]["engine"]["incarnation"] == ref.incarnation.hex()
    assert found["geometry"]["identity"] == {"model": "tiny"}
    assert len(bytes.fromhex(found["home_epoch"])) == 16
    scene.read("reader")
    (transfer,) = scene.answer("transfers", "--engine", "hex")["transfers"]
    assert len(bytes.fromhex(transfer["read"]["reader"]["incarnation"])) == 16


def test_listings_are_filtered(scene: Scene) -> None:
    scene.engine("filtered")
    scene.read("one"), scene.read("two")
    of = ("--engine", "filtered")
    assert len(scene.answer("transfers", *of)["transfers"]) == 2
    (transfer,) = scene.answer("transfers", *of, "--reader", "two", "--request", "cmpl-1")["transfers"]
    assert transfer["read"]["reader"]["engine_id"] == "two"
    assert len(scene.answer("requests", *of, "--reader", "one")["requests"]) == 1
    assert scene.answer("requests", *of, "--request", "cmpl-2")["requests"] == []
    assert "Nothing that was asked for" in scene.run("requests", "--request", "nothing").stdout


def test_tables_of_long_lists_are_cut_and_say_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.engine("long")
    of = ("--engine", "long")
    for reader in ("a", "b", "c"):
        scene.read(reader)
    for most, shown in ((2, 2), (3, 3)):
        monkeypatch.setattr("kvferry._cli.node.MOST_ROWS", most)
        done = scene.run("transfers", *of)
        assert done.stdout.count("cmpl-1") == shown
        assert (done.returncode, "There are more: --engine" in done.stderr) == (0, shown < 3)
        assert len(scene.answer("transfers", *of)["transfers"]) == 3


def test_failed_read_shows_its_reason(scene: Scene) -> None:
    scene.engine("failing")
    of = ("--engine", "failing")
    # A reader of a later version may have reasons that are unknown here.
    for reason in (pb.RankReport(reason=9999), pb.RankReport(reason=errors_pb2.TRANSFER_STUCK)):  # type: ignore[arg-type]
        reason.outcome = pb.RANK_OUTCOME_FAILED
        scene.report(scene.read("reader").lease_id, reason)
    unknown, stuck = scene.answer("transfers", *of)["transfers"]
    reasons = [transfer["reports"][0]["reason"] for transfer in (unknown, stuck)]
    assert reasons == ["ERROR_REASON_UNSPECIFIED", "TRANSFER_STUCK"]
    (request,) = scene.answer("requests", *of)["requests"]
    assert request["last_failure"] == "TRANSFER_STUCK"
    table = scene.run("transfers", *of).stdout
    assert "failed: no reason given (rank 0)" in table
    assert "failed: TRANSFER_STUCK (rank 0)" in table
    assert "published, a read failed: TRANSFER_STUCK" in scene.run("requests", *of).stdout
    assert {**stuck, "server": scene.server.address} in scene.answer("top", "--once")["transfers"]


def test_end_lease_lets_a_lease_run_out(scene: Scene) -> None:
    scene.engine("leased")
    number = str(scene.read("reader").lease_number)
    done = scene.run("end-lease", "leased", number, "--yes")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Lease {number} ends in ")
    found = scene.answer("end-lease", "leased", number, "--yes")
    assert found["state"] == "READ_STATE_READING"
    assert found["remaining"] != "0s"
    missing = scene.run("end-lease", "leased", "987654", "--yes")
    assert missing.returncode == 1
    assert "it never had one, or it ended long ago" in missing.stderr
    assert missing.stderr.rstrip().endswith("[LEASE_ENDED]")


def test_abort_ends_a_publication(scene: Scene) -> None:
    scene.engine("aborted")
    scene.read("reader")
    assert scene.answer("abort", "aborted", "1", "--yes")["leases"] == "1"
    again = scene.run("abort", "aborted", "1", "--yes")
    assert again.stdout.startswith("Publication 1 is ending. 1 lease is live; the last ends in ")
    assert scene.run("abort", "aborted", "2", "--yes").stderr.rstrip().endswith("[PUBLICATION_STALE]")


def test_reference_is_waited_for_and_declined(scene: Scene) -> None:
    scene.engine("routed")
    made = router_reference(scene.server.advertise, "routed", router_key="room-7")
    scene.reference = made
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(scene.read, "waiter")
        while not (listed := scene.answer("transfers", "--engine", "routed")["transfers"]):
            pass
        table = scene.run("transfers", "--engine", "routed").stdout
        assert all(part in table for part in ("none yet", "router key room-7", "waiting", "waits for "))
        assert (listed[0]["router_key"], listed[0]["publication"]) == ("room-7", "0")
        assert scene.run("decline", made).stdout == "Declined: nobody reads it.\n"
        with pytest.raises(grpc.RpcError, match="declined before it came"):
            waiting.result(20)
    assert "error" not in scene.answer("decline", made)["results"][0]
    unknown = scene.run("decline", router_reference("", "nobody"))
    assert unknown.returncode == 1
    assert "[ENGINE_UNKNOWN]" in unknown.stderr
    command = [sys.executable, "-m", "kvferry._cli", "decline", "--server", scene.server.address]
    done = subprocess.run(command, input=made, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "Declined: nobody reads it.\n"


def test_evict_ends_an_engine(scene: Scene) -> None:
    scene.engine("stuck")
    done = scene.run("evict", "stuck", "--yes")
    assert done.stdout == "'stuck' is evicted. No lease is live.\n"
    assert "stuck" not in scene.run("engines").stdout
    assert scene.run("evict", "stuck", "--yes").returncode == 1
    # A thread reads the log, perhaps after the answer.
    until(lambda: "EvictEngine by the UNIX socket engine_id='stuck'" in scene.server.log)


def test_commands_that_act_do_nothing_without_a_confirmation(scene: Scene) -> None:
    scene.engine("asked")
    lease = str(scene.read("reader").lease_number)
    for command in (["drain"], ["end-lease", "asked", lease], ["abort", "asked", "1"], ["evict", "asked"]):
        done = scene.run(*command)
        assert done.returncode == 2
        assert "--yes" in done.stderr
    # The last action is logged last; lines of other tests may be read late.
    assert scene.run("evict", "asked", "--yes").returncode == 0
    until(lambda: "EvictEngine by the UNIX socket engine_id='asked'" in scene.server.log)
    acts = [line for line in scene.server.log.splitlines() if "Drain by" in line or "engine_id='asked'" in line]
    assert len([line for line in acts if " by the UNIX socket" in line]) == 1


@pytest.mark.parametrize(("said", "code"), [("n", 1), ("y", 0)])
def test_confirmation_is_asked_on_the_terminal(scene: Scene, said: str, code: int) -> None:
    name = f"asked-{said}"
    scene.engine(name)
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvferry._cli", "evict", name, "--server", scene.server.address]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment()) as process:
        os.close(theirs)
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(terminal, 1024)
        os.write(terminal, said.encode() + b"\n")
        assert process.wait(30) == code
    os.close(terminal)
    assert b"with 1 requests and 0 leases" in asked
    assert (name in scene.run("engines").stdout) == (said == "n")


def test_drain_waits_for_leases_and_shows_in_health(tmp_path: Path) -> None:
    flags = ("--listen", "", "--drain", "0", "--ttl", "1", "--max-ttl", "1")
    with Kvferryd("--unix", str(tmp_path / "node.sock"), *flags) as server, connect(server.address) as channel:
        scene = Scene(server, KVTransferStub(channel))
        scene.engine("source")
        for service in ("", "kvferry.v1.KVTransfer"):
            done = scene.run("health", "--service", service)
            assert (done.returncode, done.stdout) == (0, "SERVING\n")
        scene.read("reader")
        done = scene.run("drain", "--yes", "--wait", "0.01")
        assert done.returncode == 1
        assert "is draining. 1 lease is live; the last ends in " in done.stdout
        began = time.monotonic()
        done = scene.run("drain", "--yes", "--wait", "30")
        assert done.returncode == 0
        assert done.stdout.endswith("is draining. No lease is live.\n")
        assert time.monotonic() - began < 25
        assert scene.answer("info")["draining"]
        done = scene.run("health")
        assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")
        assert server.running


def test_health_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path, "ours")
    with Kvferryd("--unix", "", "--listen", "127.0.0.1:0", *tls_flags(authority.issue("node"))) as server:
        probe = tls_flags(authority.issue("probe"))
        assert run_kvferry("health", "--server", server.address, *probe).stdout == "SERVING\n"
        assert run_kvferry("health", "--server", server.address).returncode == 1
        unknown = run_kvferry("health", "--server", server.address, *probe, "--service", "nobody.Here")
        assert unknown.returncode == 1
        # No caller on TCP with certificates is an operator.
        refused = run_kvferry("drain", "--yes", "--server", server.address, *probe)
        assert refused.returncode == 1
        assert refused.stderr.rstrip().endswith("[NOT_ALLOWED]")


def test_health_starts_without_unneeded_imports(tmp_path: Path) -> None:
    heavy = ["rich.console", "numpy", "kvferry.v1.introspection_pb2", "kvferry_server", "torch", "nixl"]
    code = (
        "import sys; sys.argv = ['kvferry', 'health', '--server', 'unix:/nowhere', '--timeout', '0.1']\n"
        "from kvferry._cli import main\n"
        "try: main()\n"
        f"except SystemExit: print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
