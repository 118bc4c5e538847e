"""The page about grpcurl, and the commands of other documents: grpcurl runs them, in every way to reach a node server,
and what the page says comes back does."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, EngineSpec, Group, ReleaseOutcome
from kvferry._wire.channel import connect
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.certificates import Authority, tls_flags
from tests.support.node_servers import Kvferryd, environment
from tests.support.repository import ROOT
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

PROGRAMS = Path(sys.executable).parent
PATHS = f"{PROGRAMS}:{os.environ.get('PATH', os.defpath)}"
PAGE = (ROOT / "examples" / "grpcurl.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
START = "Just after a start"
ANYTHING = "…"
STEP, FAILED = "<<< step", "<<< failed"
"""What the shell prints by itself, before each block and after a command that fails."""

WAYS = ("tcp", "unix", "mtls")
POLICY = """
[[rule]]
identities = ["spiffe://fleet.example/operator/*"]
engine = ["by-hand"]
reader = ["*"]
observer = true
admin = true
"""

pytestmark = pytest.mark.skipif(shutil.which("grpcurl", path=PATHS) is None, reason="grpcurl is not installed here")


@dataclass(frozen=True)
class Step:
    """A block of commands, and what the page says comes back: JSON, or lines of text."""

    commands: str
    answer: str = ""
    is_json: bool = False

    @property
    def refused(self) -> bool:
        """Whether the page says that it fails."""
        return "  Code: " in self.answer


def steps(text: str) -> list[Step]:
    """The blocks of commands of a text. What stands before the first of them is no answer."""
    found: list[Step] = []
    for kind, block in FENCE.findall(text):
        if kind == "sh":
            found.append(Step(block))
        elif found and not found[-1].answer:
            found[-1] = Step(found[-1].commands, block, kind == "json")
    return found


@dataclass(frozen=True)
class Place:
    """A node server and how the page reaches it."""

    server: Kvferryd
    folder: Path
    node: str

    def run(self, steps: Sequence[Step]) -> list[tuple[str, int]]:
        """Run the commands in one shell. Returns what each block has printed, and how many of its commands failed."""
        lines = ["set -E -o pipefail", f"trap 'echo \"{FAILED}\"' ERR", self.node, *_HELPERS]
        for step in steps:
            lines += [f"echo '{STEP}'", step.commands]
        # A Watch that the page leaves open would keep the output open.
        lines += ["trap - ERR", "kill $(jobs -p) 2>/dev/null"]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=self.folder,
            env={**environment(), "PATH": PATHS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        answers = done.stdout.split(f"{STEP}\n")[1:]
        assert len(answers) == len(steps), done.stdout
        return [(answer.replace(f"{FAILED}\n", ""), answer.count(FAILED)) for answer in answers]


_OPENING = steps(PAGE[: PAGE.index("\n## ")])
NODES = dict(zip(WAYS, _OPENING[0].commands.splitlines(), strict=True))
"""The page's ways to reach a node server."""
_HELPERS = [step.commands for step in _OPENING[1:]]


@contextmanager
def placed(folder: Path, way: str, *flags: str) -> Iterator[Place]:
    """A node server, and the page's way to reach it, with the names of this server and its files in place of the
    page's."""
    names = {"/run/kvferry/node.sock": str(folder / "node.sock")}
    more: list[str] = []
    if way == "mtls":
        authority = Authority.make(folder, "ours")
        (folder / "policy.toml").write_text(POLICY)
        more = [*tls_flags(authority.issue("node")), "--policy", str(folder / "policy.toml")]
        client = authority.issue("client", "URI:spiffe://fleet.example/operator/you")
        files = {"ca.pem": client.ca, "client.pem": client.cert, "client.key": client.key}
        names |= {name: str(path) for name, path in files.items()}
    listeners = ("--unix", f"{folder}/node.sock", "--listen", "127.0.0.1:0", "--drain", "0")
    with Kvferryd(*listeners, *more, *flags) as server:
        names["127.0.0.1:7423"] = server.addresses[1]
        node = re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], NODES[way])
        yield Place(server, folder, node)


@contextmanager
def engines(place: Place) -> Iterator[tuple[Cache, Cache]]:
    """The page's engines: prefill-0, which has published cmpl-7, and decode-0, which has a lease on it."""
    group, axes = Group("full", block_tokens=16, num_blocks=16), ("kv", "block", "head", "token", "content")
    with ExitStack() as stack:
        caches = []
        for name in ("prefill-0", "decode-0"):
            tensors = {f"layers.{layer}": np.zeros((2, 16, 2, 16, 8), np.uint16) for layer in range(2)}
            client = stack.enter_context(Client(place.server.address))
            spec = EngineSpec(name, (group,), identity={"model": "tiny"})
            caches.append(client.register_cache(spec, tensors=tensors, axes=axes))
        source, destination = caches
        published = source.session.publish("cmpl-7", {"full": Blocks([1, 2, 3], end_token=48)})
        reader = pb.EngineRef(engine_id="decode-0", incarnation=destination.session.token.incarnation)
        request = pb.ReadBlocksRequest(
            reference=published.reference, reader=reader, read_id=secrets.token_bytes(16), parties=1
        )
        with connect(place.server.address) as channel:
            KVTransferStub(channel).ReadBlocks(request, timeout=30)
        yield source, destination


def fits(shown: Any, found: Any) -> bool:
    """Whether an answer is what the page shows of it."""
    if shown == ANYTHING:
        return True
    if isinstance(shown, dict):
        return isinstance(found, dict) and all(name in found and fits(shown[name], found[name]) for name in shown)
    if isinstance(shown, list):
        first = shown[:-1] if shown[-1:] == [ANYTHING] else shown
        if not isinstance(found, list) or (first is shown and len(shown) != len(found)) or len(first) > len(found):
            return False
        return all(fits(*pair) for pair in zip(first, found, strict=False))
    return like(shown, found) if isinstance(shown, str) and isinstance(found, str) else bool(shown == found)


def like(shown: str, found: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split(ANYTHING))), found) is not None


def values(text: str) -> list[Any]:
    """The JSON values that stand one after the other in a text."""
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].lstrip()
    return found


def check(step: Step, printed: str, failed: int) -> None:
    """Check that what a step printed is what the page says."""
    assert bool(failed) == step.refused, f"{step.commands}\n{printed}"
    if step.is_json:
        shown, found = values(step.answer), values(printed)
        assert len(shown) == len(found), printed
        for expected, got in zip(shown, found, strict=True):
            assert fits(expected, got), f"{json.dumps(expected, ensure_ascii=False)} is not what came: {got}"
        return
    lines = iter(printed.splitlines())
    for expected in step.answer.splitlines():
        assert any(like(expected, line) for line in lines), f"{expected!r} is not in, or not in order:\n{printed}"


@pytest.mark.parametrize("way", ["unix", *(pytest.param(way, marks=pytest.mark.slow) for way in ("tcp", "mtls"))])
def test_commands_of_the_page_answer_what_it_says(way: str, tmp_path: Path) -> None:
    sections = [text for name, text in SECTIONS.items() if name != START]
    acting = [step for step in steps(SECTIONS["Act"]) if "v1.Admin/" in step.commands]
    (refusal,) = [text for kind, text in FENCE.findall(SECTIONS["Act"]) if kind == "text" and "  Code: " in text]
    run = [step for text in sections for step in steps(text)]
    assert len(acting) == 2
    leases = ("--ttl", "500", "--max-ttl", "500")
    with placed(tmp_path, way, "--engine-ttl", "0.01", *leases) as place, engines(place) as (source, _):
        for step, (printed, failed) in zip(run, place.run(run), strict=True):
            if way == "tcp" and step in acting:
                calls = step.commands.count("grpcurl ")
                check(Step(step.commands, refusal), printed, failed)
                assert (failed, printed.count('"reason":"NOT_ALLOWED"')) == (calls, calls)
            else:
                check(step, printed, failed)
            if "od -An" in step.commands:
                assert source.session.token.incarnation.hex() in printed


@pytest.mark.parametrize("way", WAYS)
def test_commands_of_the_page_just_after_a_start_answer_what_it_says(way: str, tmp_path: Path) -> None:
    run = steps(SECTIONS[START])
    assert len(run) == 2
    with placed(tmp_path, way, "--engine-ttl", "600") as place:
        for step, (printed, failed) in zip(run, place.run(run), strict=True):
            check(step, printed, failed)


def test_value_takes_a_field_out_of_answers_in_either_spelling() -> None:
    for name in ("home_epoch", "homeEpoch"):
        answer = json.dumps({"engines": [], name: "+j+vhQ==", "next": {name: "other"}}, indent=2)
        command = [*_HELPERS, "value 'home_?[eE]poch'"]
        done = subprocess.run(
            ["bash", "-c", "\n".join(command)], input=answer, capture_output=True, text=True, check=True
        )
        assert done.stdout == "+j+vhQ==\n"


def commands_elsewhere() -> dict[str, list[Step]]:
    """The blocks of commands that call grpcurl, by the document beside the page."""
    pages = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.name != "rpc.md"]
    found = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    called = {name: [step for step in steps(text) if "grpcurl" in step.commands] for name, text in found.items()}
    return {name: run for name, run in called.items() if run}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("document", commands_elsewhere())
def test_commands_of_other_documents_decline_what_they_name(document: str, way: str, tmp_path: Path) -> None:
    run = commands_elsewhere()[document]
    with placed(tmp_path, way, "--engine-ttl", "0.01") as place, engines(place) as (source, _):
        offered = [source.session.publish(f"request-{index}", {"full": Blocks([index])}) for index in range(len(run))]
        given = [
            Step(step.commands.replace(f"kvf1.{ANYTHING}", publication.reference))
            for step, publication in zip(run, offered, strict=True)
        ]
        for step, (printed, failed) in zip(given, place.run(given), strict=True):
            assert ANYTHING not in step.commands
            assert not failed, printed
            assert [result.keys() for result in values(printed)[0]["results"]] == [{"done"}]
        released: dict[int, ReleaseOutcome] = {}

        def all_released() -> bool:
            released.update({release.publication: release.outcome for release in source.session.released(timeout=0.1)})
            return set(released) == {publication.number for publication in offered}

        until(all_released)
        assert set(released.values()) == {ReleaseOutcome.DECLINED}
