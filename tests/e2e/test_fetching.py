"""`kvferry fetch` writes what an engine has cached of a prompt: from real node servers, over NIXL, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest

from examples.demo import expected
from kvferry import Blocks, EngineSession, IntegrityOptions, MissReason, Prompt, Publication
from kvferry.geometry import EngineGeometry
from tests.support.caches import Model, kv, shards, write
from tests.support.certificates import Authority, tls_flags
from tests.support.engines import Engine
from tests.support.held_ranks import HeldRanks, allocate, document
from tests.support.node_servers import Kvferryd, environment

MakeEngine = Callable[..., Engine]
TOKENS, CACHED = 75, 48
IDS = [100 + token for token in range(TOKENS)]
PROMPT = [str(token) for token in IDS]
FULL_DISK = """
import resource, safetensors
serialize_file = safetensors.serialize_file
def limited(*given):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    serialize_file(*given)
safetensors.serialize_file = limited
"""
NO_MEMORY = """
import numpy
zeros = numpy.zeros
numpy.zeros = lambda size, *of: zeros(1 << 60 if of == (numpy.uint8,) else size, *of)
"""
RESTARTED = """
from dataclasses import replace
from kvferry._cli.connection import Node
geometry = Node.geometry
Node.geometry = lambda *of: replace(geometry(*of), incarnation=bytes(16))
"""
PROGRAM = """
import sys
from kvferry._cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


class Fetch:
    """The command, running."""

    def __init__(self, *arguments: object, stdin: str = "", program: str = "") -> None:
        with TemporaryFile("w+") as given:
            given.write(stdin)
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", program + PROGRAM, "fetch", *map(str, arguments)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )

    def ended(self) -> subprocess.CompletedProcess[str]:
        out, error = self._process.communicate(timeout=60)
        *said, torch = error.splitlines()
        # With a build for a GPU, NIXL imports it.
        assert torch == str(not metadata.version("torch").endswith("+cpu"))
        return subprocess.CompletedProcess([], self._process.returncode, out, "\n".join(said))


def contents(file: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """The metadata of a safetensors file, and dtype, shape and bytes of its tensors, from the format's definition."""
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header: dict[str, Any] = json.loads(whole[8:begin])
    about = header.pop("__metadata__")
    found = {}
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        found[name] = tensor["dtype"], tensor["shape"], whole[begin + first : begin + last]
    return about, found


def answer(
    session: EngineSession, blocks: dict[str, Blocks], first: int = 0, *, checksums: bool = False
) -> Publication:
    """Answer the question of the command, which asks from the token `first` on."""
    (question,) = session.questions(timeout=30)
    assert question.first_token == first
    return session.publish("cached", blocks, reference=question.reference, prompt=question.prompt, checksums=checksums)


def source_of(engine: MakeEngine, home: str, tp: int, block_tokens: int = 16) -> tuple[Engine, dict[str, Blocks], Any]:
    """An engine with the KV of a request in scattered blocks, these, and the KV, ``uint8[heads, tokens, bytes]`` by
    layer and component."""
    model = Model(block_tokens=block_tokens)
    source, request = engine(home, model, shards(model.heads, tp)).ready(), kv(model, 1, CACHED)
    ids = np.random.default_rng(2).permutation(model.num_blocks)[: CACHED // block_tokens].tolist()
    for memory in source.memories:
        write(memory, request, ids)
    return source, {"full": Blocks(ids, end_token=CACHED)}, request


def check(file: Path, request: Any, first: int = 0) -> dict[str, str]:
    about, found = contents(file)
    assert set(found) == {f"layers.{layer}/{component}" for layer, component in request}
    for (layer, component), values in request.items():
        dtype, shape, cells = found[f"layers.{layer}/{component}"]
        assert (dtype, shape) == ("BF16", [CACHED - first, values.shape[0], values.shape[2] // 2])
        assert cells == values[:, first:].transpose(1, 0, 2).tobytes()
    return about


@pytest.mark.parametrize(("tp", "block_tokens"), [(1, 16), (2, 8), (3, 4)])
def test_fetch_writes_the_tokens_of_all_heads_in_their_order(
    engine: MakeEngine, homes: tuple[str, str], tmp_path: Path, tp: int, block_tokens: int
) -> None:
    source, blocks, request = source_of(engine, homes[0], tp, block_tokens)
    running = Fetch(source.session.engine_reference, *PROMPT, "--adapter", "lora", "--output", tmp_path / "kv")
    (question,) = source.session.questions(timeout=30)
    assert question.prompt.digest(TOKENS) == Prompt(IDS, adapter="lora").digest(TOKENS)
    publication = source.session.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    done = running.ended()
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens [0, 48) of 75, 4 tensors, 12288 bytes" in done.stdout
    about = check(tmp_path / "kv", request)
    assert about == {
        "engine": source.spec.engine_id,
        "incarnation": source.session.token.incarnation.hex(),
        "identity": '{"model": "tiny"}',
        "adapter": "lora",
        "token_ids": json.dumps(IDS[:CACHED]),
        "first_token": "0",
        "formats": json.dumps(dict.fromkeys([f"layers.{n}/{c}" for n in range(2) for c in ("key", "value")], "plain")),
    }
    assert source.release_of(publication).outcome.name == "READ"


def test_fetch_takes_secrets_and_tokens_from_files_and_begins_inside_a_block(
    engine: MakeEngine, homes: tuple[str, str], tmp_path: Path
) -> None:
    source, blocks, request = source_of(engine, homes[0], 2)
    (tmp_path / "tokens.json").write_text(json.dumps(IDS))
    # The longest name that a file can have.
    output = tmp_path / ("kv" * 127)
    options = ("--first-token", 20, "--output", output)
    for tokens, more in ((tmp_path / "tokens.json", ""), ("-", " ".join(PROMPT))):
        given = f"{source.session.engine_reference}\n{more}"
        running = Fetch("-", "--tokens", tokens, *options, stdin=given)
        answer(source.session, blocks, first=20)
        assert running.ended().returncode == 0
        assert check(output, request, first=20)["first_token"] == "20"


def test_fetch_of_nothing_writes_nothing(engine: MakeEngine, homes: tuple[str, str], tmp_path: Path) -> None:
    source, _, _ = source_of(engine, homes[0], 1)
    (tmp_path / "kv").write_text("of before")
    running = Fetch(source.session.engine_reference, *PROMPT, "--output", tmp_path / "kv")
    (question,) = source.session.questions(timeout=30)
    source.session.miss(question, MissReason.NOT_CACHED)
    done = running.ended()
    assert (done.returncode, done.stdout) == (1, "")
    assert "NOT_CACHED" in done.stderr
    assert done.stderr.endswith("[PREFIX_MISS]")
    assert [(file.name, file.read_text()) for file in tmp_path.glob("*kv*")] == [("kv", "of before")]


def test_fetch_that_cannot_write_all_leaves_the_file_of_before(
    engine: MakeEngine, homes: tuple[str, str], tmp_path: Path
) -> None:
    source, blocks, _ = source_of(engine, homes[0], 1)
    (tmp_path / "kv").write_text("of before")
    running = Fetch(source.session.engine_reference, *PROMPT, "--output", tmp_path / "kv", program=FULL_DISK)
    answer(source.session, blocks)
    done = running.ended()
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot write" in done.stderr
    assert [(file.name, file.read_text()) for file in tmp_path.glob("*kv*")] == [("kv", "of before")]


def test_fetch_of_more_than_memory_holds_asks_nobody(
    engine: MakeEngine, homes: tuple[str, str], tmp_path: Path
) -> None:
    source, _, _ = source_of(engine, homes[0], 1)
    done = Fetch(source.session.engine_reference, *PROMPT, "--output", tmp_path / "kv", program=NO_MEMORY).ended()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvferry: no memory for 20480 bytes, the cache of 75 tokens"
    assert source.session.questions(timeout=0.1) == []


def test_fetch_from_an_engine_that_has_restarted_since_it_was_looked_at_writes_nothing(
    engine: MakeEngine, homes: tuple[str, str], tmp_path: Path
) -> None:
    """It may hold other planes now."""
    source, blocks, _ = source_of(engine, homes[0], 1)
    name = source.session.engine_reference
    running = Fetch(name, *PROMPT, "--output", tmp_path / "kv", program=RESTARTED)
    publication = answer(source.session, blocks)
    done = running.ended()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("[PEER_RESTARTED]")
    assert not (tmp_path / "kv").exists()
    assert source.release_of(publication).outcome.name == "DECLINED"


HYBRID = {
    "tp_size": 2,
    "layout": "NHD",
    "groups": [
        {"name": "full", "layers": [0], "pool": "kv", "null_block": 0},
        {"name": "window", "kind": "window", "window": 40, "layers": [1], "pool": "kv", "null_block": 0},
        {
            "name": "mamba",
            "kind": "state",
            "num_blocks": 8,
            "layers": [2, 3],
            "components": [
                {"name": "conv_x", "units": 64, "rows": 3},
                {"name": "ssm", "units": 8, "content": 128, "dtype": "float32"},
            ],
        },
    ],
}


def test_fetch_writes_windows_and_states_as_they_are_at_the_end(homes: tuple[str, str], tmp_path: Path) -> None:
    geometry = document(HYBRID)
    blocks = allocate(geometry, TOKENS, 0, 1)
    held = HeldRanks(homes[0], geometry, "", serve=True)
    try:
        held.fill("request", blocks)
        running = Fetch(held.session.engine_reference, *PROMPT, "--output", tmp_path / "kv")
        answer(held.session, blocks)
        done = running.ended()
        assert done.returncode == 0, done.stderr
    finally:
        held.close()
    _, found = contents(tmp_path / "kv")
    assert {name: (dtype, shape) for name, (dtype, shape, _) in found.items()} == {
        **dict.fromkeys(("layers.0/key", "layers.0/value"), ("BF16", [TOKENS, 8, 16])),
        # The window, which the last token is part of.
        **dict.fromkeys(("layers.1/key", "layers.1/value"), ("BF16", [40, 8, 16])),
        **dict.fromkeys(("layers.2/conv_x", "layers.3/conv_x"), ("BF16", [3, 64, 1])),
        **dict.fromkeys(("layers.2/ssm", "layers.3/ssm"), ("F32", [1, 8, 128])),
    }
    for name, (_, shape, cells) in found.items():
        states = computed(geometry, name, blocks)
        assert cells == states[len(states) - shape[0] :].tobytes(), name


def test_fetch_compares_the_checksums_of_an_engine_that_makes_them(homes: tuple[str, str], tmp_path: Path) -> None:
    geometry = document({"tp_size": 2})
    blocks, others = allocate(geometry, TOKENS, 0, 1), allocate(geometry, TOKENS, 0, 2)
    held = HeldRanks(homes[0], geometry, "", serve=True, integrity=IntegrityOptions("full"))
    try:
        held.fill("request", blocks)
        running = Fetch(held.session.engine_reference, *PROMPT, "--output", tmp_path / "kv")
        publication = answer(held.session, blocks, checksums=True)
        for cache, _, _ in held.ranks:
            cache.checksum(publication.number, others)
        done = running.ended()
    finally:
        held.close()
    assert done.returncode == 1
    assert done.stderr.endswith("[DATA_LOSS]")
    assert not (tmp_path / "kv").exists()


def computed(geometry: EngineGeometry, name: str, blocks: dict[str, Blocks]) -> np.ndarray:
    """What the ranks hold of a plane together, ``uint8[states, units, bytes]``, up to the end of the request."""
    planes = sorted((p for _, p in geometry.planes() if p.name == name), key=lambda plane: plane.units.begin)
    group = geometry.group(planes[0].group)
    count = -(-TOKENS // group.block_tokens) if group.block_tokens else 1
    parts = [expected("request", p, range(count)).reshape(-1, len(p.units), p.state_bytes) for p in planes]
    whole = np.concatenate(parts, axis=1)
    return whole[:TOKENS] if group.block_tokens else whole


def test_fetch_names_an_engine_by_its_home_or_a_directory_with_a_certificate(
    engine: MakeEngine, tmp_path: Path
) -> None:
    authority = Authority.make(tmp_path, "fleet")
    mine = tls_flags(authority.issue("operator", "DNS:operator.example,IP:127.0.0.1"))
    (tmp_path / "policy.toml").write_text(
        'rule = [{identities = ["operator.example"], observer = true, reader = ["engine-*"], engine = ["fetch-*"]}]'
    )
    flags = [*tls_flags(authority.issue("node")), "--policy", f"{tmp_path}/policy.toml"]
    unix = f"{tmp_path}/node.sock"
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", unix, "--drain", "0", *flags) as server:
        source, blocks, request = source_of(engine, server.address, 2)
        engine_id = source.spec.engine_id
        listed = {"engines": {engine_id: {"home": server.advertise}}}
        (tmp_path / "fleet.json").write_text(json.dumps(listed))
        ways: Sequence[tuple[str, ...]] = (
            (f"{engine_id}@{server.advertise}",),
            (engine_id, "--directory", f"file:{tmp_path}/fleet.json"),
        )
        for name, *options in ways:
            running = Fetch(name, *PROMPT, *options, *mine, "--output", tmp_path / "kv")
            answer(source.session, blocks)
            done = running.ended()
            assert done.returncode == 0, done.stderr
            check(tmp_path / "kv", request)
            (tmp_path / "kv").unlink()
