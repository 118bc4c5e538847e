"""The examples of the README work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kvferry
from examples import engine_pair
from kvferry import Blocks, ReleaseOutcome
from kvferry.errors import PublicationReleased
from kvferry.testing import Fabric
from tests.support.caches import Model, shards
from tests.support.engines import Engine
from tests.support.guides import commands
from tests.support.node_servers import free_port
from tests.support.repository import ROOT
from tests.support.waiting import without_waits


def test_readme_shows_the_example_that_runs() -> None:
    example = (ROOT / "examples" / "one_process.py").read_text()
    body = example[example.index("import numpy") :]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text()


def test_example_in_one_process_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "one_process.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["moved 163840 bytes in 20 descriptors", "request-1 was released: READ"]
    assert without_waits(done.stderr) == ""


def over_nixl(capsys: pytest.CaptureFixture[str]) -> str:
    """The engine pair as its command runs it: a node server, a process for each worker, bytes over NIXL."""
    command = [sys.executable, str(ROOT / "examples" / "engine_pair.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


def in_memory(capsys: pytest.CaptureFixture[str]) -> str:
    """The same code as an engine's own tests run it: a fabric, a thread for each worker."""
    with Fabric() as fabric:
        engine_pair.run(fabric.address, threading.Thread)
    return capsys.readouterr().out


@pytest.mark.parametrize("pair", [over_nixl, in_memory], ids=["over-nixl", "in-memory"])
def test_engine_pair_runs(
    pair: Callable[[pytest.CaptureFixture[str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pair(capsys).splitlines() == [
        "granted: blocks [0, 1, 2, 3] of prefill",
        "read: 25600 bytes, error: None; the engine went on stepping: True",
        "every token is right: True",
        "released: request-1, READ",
    ]


def test_the_guide_to_testing_shows_tests_that_pass(tmp_path: Path) -> None:
    example = ROOT / "examples" / "test_scheduler.py"
    shown = re.findall(r"^```python\n(def test_.*?)^```", (ROOT / "docs" / "testing.md").read_text(), re.M | re.S)
    assert [test in example.read_text() for test in shown] == [True]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    command = [sys.executable, "-m", "pytest", *options, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "4 passed" in done.stdout, done.stdout
    assert done.returncode == 0


class Answering:
    """An HTTP server that answers every POST by calling `answer` with its body; None: it refuses. Bytes are sent as
    they are."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                found = answer(body)
                self.send_response(200 if found is not None else 503)
                self.end_headers()
                self.wfile.write(found if isinstance(found, bytes) else json.dumps(found).encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[Any], Any]], Answering]]:
    made: list[Answering] = []

    def make(answer: Callable[[Any], Any]) -> Answering:
        made.append(Answering(answer))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dispatch.js", "look.js", "router.js", "sessions.js"])
def test_typescript_programs_print_their_usage(compiled: Path, program: str) -> None:
    done = subprocess.run(
        ["node", str(compiled / program), "x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: node {program} ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_typescript_commands_of_the_readme_run(
    homes: tuple[str, str], engine: Callable[..., Engine], compiled: Path
) -> None:
    source = engine(homes[0], Model(), shards(4, 1)).ready()
    enter, install, *look = commands("examples/README.md", "TypeScript")
    # The fixture has done that.
    assert (enter, install) == ("cd examples/router", "npm install && npx tsc")
    info, *engines = as_printed([enter, *look], homes[0], compiled.parents[1]).splitlines()
    assert json.loads(info)["version"] == kvferry.__version__
    assert source.spec.engine_id in [json.loads(one)["engine"]["engine_id"] for one in engines]


@pytest.mark.slow
def test_a_client_in_typescript_lists_declines_and_follows(
    homes: tuple[str, str], engine: Callable[..., Engine], compiled: Path
) -> None:
    def command(server: str, *arguments: str) -> list[str]:
        return ["node", str(compiled / "look.js"), server, str(ROOT / "protos"), *arguments]

    def look(*arguments: str, server: str = homes[0]) -> list[Any]:
        done = subprocess.run(command(server, *arguments), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    source = engine(homes[0], Model(), shards(4, 1)).ready()
    offered = source.session.publish("followed", {"full": Blocks([1])})
    (info,) = look("info")
    assert info["version"] == kvferry.__version__
    assert "decline_forwarding" in info["capabilities"]
    listed = {one["engine"]["engine_id"]: one for one in look("engines")}
    assert listed[source.spec.engine_id]["engine"]["incarnation"] == source.session.token.incarnation.hex()
    assert "followed" in [one["request_id"] for one in look("requests")]
    assert source.spec.engine_id not in [one["source"]["engine_id"] for one in look("transfers")]
    following = subprocess.Popen(command(homes[0], "follow", "followed"), stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    with following:
        ((one,),) = [json.loads(following.stdout.readline())]
        assert (one["state"], one["leases"]) == ("REQUEST_STATE_PUBLISHED", "0")
        # Another node server than the home of the reference.
        assert look("decline", offered.reference, server=homes[1]) == []
        assert source.release_of(offered).outcome is ReleaseOutcome.DECLINED
        assert json.loads(following.stdout.readlines()[-1]) == []
        assert following.wait(30) == 0
    refused = subprocess.run(command(homes[1], "decline", "kvf1.x"), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.rstrip().endswith("[BAD_REFERENCE]")


def as_printed(printed: list[str], node: str, folder: Path) -> str:
    """What commands of the examples' README say of a node server, run in a folder like a checkout's."""
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *printed])],
        cwd=folder,
        # Without symbols for a debugger Rust builds faster.
        env={**os.environ, "NODE": node, "CARGO_PROFILE_DEV_DEBUG": "0"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(language: str, node: str, folder: Path) -> str:
    """What the example in a language says of a node server. The README's commands build it, in a folder, and run it."""
    printed = [line.replace("build/", f"{folder}/") for line in commands("examples/README.md", language)]
    return as_printed(printed, node, ROOT)


GO = all(map(shutil.which, ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"))) and all(
    Path("/usr/share/gocode/src", path).exists()
    for path in ("google.golang.org/grpc", "github.com/golang/protobuf/proto/registry.go")
)
"""Whether the packages that examples/go/generate.sh names are installed."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not GO, reason="Go, or one of its libraries, is not installed")
def test_a_client_in_go_is_generated_and_declines(
    homes: tuple[str, str], engine: Callable[..., Engine], tmp_path: Path
) -> None:
    source = engine(homes[0], Model(), shards(4, 1)).ready()
    listed = built("Go", homes[0], tmp_path)
    incarnation = source.session.token.incarnation.hex()
    assert f"engine {source.spec.engine_id} {incarnation} ENGINE_STATE_READY\n" in listed
    offered = source.session.publish("go", {"full": Blocks([1])})
    command = [str(tmp_path / "go" / "example"), homes[1], offered.reference]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"kvferryd {kvferry.__version__} at ")
    assert done.stdout.endswith("declined\n")
    assert source.release_of(offered).outcome is ReleaseOutcome.DECLINED


RUST = all(map(shutil.which, ("cargo", "protoc"))) and all(
    any(Path("/usr/share/cargo/registry").glob(f"{name}-[0-9]*"))
    for name in ("bytes", "h2", "http", "prost", "prost-types", "prost-build", "tokio")
)
"""Whether the packages that examples/rust/build.sh names are installed."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not RUST, reason="Rust, or one of its libraries, is not installed")
def test_a_client_in_rust_is_generated_and_declines(
    homes: tuple[str, str], engine: Callable[..., Engine], tmp_path: Path
) -> None:
    source = engine(homes[0], Model(), shards(4, 1)).ready()
    incarnation = source.session.token.incarnation.hex()
    listed = built("Rust", homes[0], tmp_path).splitlines()
    assert f"engine {source.spec.engine_id} {incarnation} ENGINE_STATE_READY" in listed
    offered = source.session.publish("rust", {"full": Blocks([1])})
    example = str(tmp_path / "rust" / "target" / "debug" / "kvferry-example")

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([example, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    # At another node server than the home.
    about, *_, declined, refused = run(homes[1], offered.reference, "kvf1.x")
    assert about.startswith(f"kvferryd {kvferry.__version__} at ")
    assert declined == "declined"
    assert refused.endswith("[BAD_REFERENCE]")
    assert source.release_of(offered).outcome is ReleaseOutcome.DECLINED
    gone = subprocess.run(
        [example, f"127.0.0.1:{free_port()}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert gone.returncode == 1
    assert "refused" in gone.stderr


@pytest.mark.slow
def test_router_routes_and_declines(
    homes: tuple[str, str],
    engine: Callable[..., Engine],
    answering: Callable[[Callable[[Any], Any]], Answering],
    compiled: Path,
) -> None:
    source = engine(homes[0], Model(), shards(4, 1)).ready()
    offered = []

    def prefill(body: Any) -> Any:
        assert body["max_tokens"] == 1
        assert body["kv_transfer_params"]["do_remote_decode"]
        offered.append(source.session.publish("r", {"full": Blocks([1])}))
        return {"kv_transfer_params": {"do_remote_prefill": True, "kvferry_reference": offered[-1].reference}}

    def decode(body: Any) -> Any:
        reference = body["kv_transfer_params"]["kvferry_reference"]
        return None if body["prompt"] == "refused" else {"text": reference, "max_tokens": body["max_tokens"]}

    port = free_port()
    urls = [answering(prefill).url, f"{answering(lambda _: None).url},{answering(decode).url}"]
    # The router declines at a node server that is not the source's home.
    command = ["node", str(compiled / "router.js"), str(port), *urls, homes[1], str(ROOT / "protos")]
    router = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert router.stdout is not None
        assert router.stdout.readline() == b"listening\n"

        def post(prompt: str) -> Any:
            body = json.dumps({"prompt": prompt, "max_tokens": 7}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", body, timeout=30) as response:
                return json.load(response)

        # The first decode engine refuses everything; the second is asked next.
        assert post("taken") == {"text": offered[0].reference, "max_tokens": 7}
        with pytest.raises(urllib.error.HTTPError):
            post("refused")
        assert source.release_of(offered[1]).outcome is ReleaseOutcome.DECLINED
    finally:
        router.kill()
        router.wait()
        if router.stdout is not None:
            router.stdout.close()
    source.session.abort(offered[0])
    source.release_of(offered[0])


@pytest.fixture(params=["dispatch_router.py", pytest.param("dispatch.ts", marks=pytest.mark.slow)])
def dispatching(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """The command of a router that asks prefill and decode at once."""
    if request.param.endswith(".py"):
        return lambda *arguments: [sys.executable, str(ROOT / "examples" / request.param), *arguments]
    compiled: Path = request.getfixturevalue("compiled")
    return lambda *arguments: ["node", str(compiled / "dispatch.js"), *arguments, str(ROOT / "protos")]


def test_router_asks_both_at_once_and_tries_the_next_prefill(
    homes: tuple[str, str],
    one_to_one: tuple[Engine, Engine],
    answering: Callable[[Callable[[Any], Any]], Answering],
    dispatching: Callable[..., list[str]],
) -> None:
    source, destination = one_to_one
    (rank,), engine_id = destination.ranks, source.spec.engine_id
    asked, refused, by_sglang = threading.Event(), list[str](), list[Any]()

    def prefill(body: Any) -> Any:
        reference = body["kv_transfer_params"]["kvferry_reference"]
        assert (body["max_tokens"], body["kv_transfer_params"]["do_remote_decode"]) == (1, True)
        # Decode has the request before prefill has answered.
        assert asked.wait(30)
        source.session.publish("dispatched", {"full": Blocks([1])}, reference=reference)
        return {"kv_transfer_params": None}

    def refusing(body: Any) -> Any:
        refused.append(body["kv_transfer_params"]["kvferry_reference"])

    def decode(body: Any) -> Any:
        reference = body["kv_transfer_params"]["kvferry_reference"]
        rank.send_read(reference, [2], None)
        asked.set()
        try:
            return {"read": rank.answer().bytes, "max_tokens": body["max_tokens"]}
        except PublicationReleased:
            return None

    port = free_port()
    sources = ",".join(f"{answering(answer).url}#{engine_id}@{homes[0]}" for answer in (refusing, prefill))
    # An SGLang, which refuses, and a vLLM.
    decodes = f"sglang+{answering(by_sglang.append).url},{answering(decode).url}"
    router = subprocess.Popen(dispatching(str(port), sources, decodes, homes[1]), stdout=subprocess.PIPE)
    try:
        assert router.stdout is not None
        assert router.stdout.readline() == b"listening\n"
        body = json.dumps({"prompt": "p", "max_tokens": 7}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", body, timeout=60) as response:
            answer = json.load(response)
        # The first prefill engine refused: decode was told at once, and read from the second.
        assert len(refused) == 1
        assert answer["max_tokens"] == 7
        assert answer["read"] > 0
        assert [release.outcome for release in source.session.released(30)] == [ReleaseOutcome.READ]
        # Each make has a field of its own for the reference: `tests/integrations` has the engines themselves.
        assert by_sglang[0]["bootstrap_host"] == refused[0]
        assert 0 < by_sglang[0]["bootstrap_room"] < 2**63
        assert (by_sglang[0]["max_tokens"], "kv_transfer_params" in by_sglang[0]) == (7, False)
    finally:
        router.kill()
        router.wait()
        if router.stdout is not None:
            router.stdout.close()


def test_router_declines_a_request_that_decode_answers_with_nonsense(
    homes: tuple[str, str],
    one_to_one: tuple[Engine, Engine],
    answering: Callable[[Callable[[Any], Any]], Answering],
    dispatching: Callable[..., list[str]],
) -> None:
    """And it does not keep its client until a prefill engine answers that hangs."""
    source, _ = one_to_one
    published, over = threading.Event(), threading.Event()

    def prefill(body: Any) -> Any:
        reference = body["kv_transfer_params"]["kvferry_reference"]
        source.session.publish("nonsense", {"full": Blocks([1])}, reference=reference)
        published.set()
        over.wait(60)
        return {}

    def decode(_: Any) -> Any:
        assert published.wait(30)
        return b"<html>"

    port = free_port()
    prefills = f"{answering(prefill).url}#{source.spec.engine_id}@{homes[0]}"
    router = subprocess.Popen(dispatching(str(port), prefills, answering(decode).url, homes[1]), stdout=subprocess.PIPE)
    try:
        assert router.stdout is not None
        assert router.stdout.readline() == b"listening\n"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}", b'{"prompt": "p"}', timeout=30)
        caught.value.close()
        assert caught.value.code == 502
        assert not over.is_set()
        assert [release.outcome for release in source.session.released(30)] == [ReleaseOutcome.DECLINED]
    finally:
        over.set()
        router.kill()
        router.wait()
        if router.stdout is not None:
            router.stdout.close()
