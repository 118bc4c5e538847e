"""Sessions that a router moves between real vLLM engines: another one goes on with the prompt and what was generated,
and reads what the one before has in its prefix cache.

vLLM runs its FlashAttention backend here, whose blocks may have any size (`tests.support.vllm_flash_attention`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.repository import ROOT
from tests.support.vllm_engines import PREFILL, Node, Server, kvferry, make_model, prompt, request
from tests.support.vllm_flash_attention import environment
from tests.support.vllm_requests import offered, pinned
from tests.support.vllm_versions import MINOR
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(MINOR < 32, reason="not run with this vLLM yet"),
]
OF_ITS_OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine has a process and a loop of its own, as in a server, and waits there for requests and questions."""
WHOLE = 100
"""Tokens of a whole answer."""
PART = 30
"""Tokens after which a session moves."""
BLOCK = {"prefill": 32, "decode": 16, "other": 32, "reader": 32}
"""Tokens per block of each engine."""


@pytest.fixture(scope="module")
def engine(home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start an engine, once: prefill and other have one rank, decode has two. All read and are read from."""
    folder = tmp_path_factory.mktemp("moved")
    model = make_model(folder / "model", kv_heads=4)
    made: dict[str, Node] = {}

    def make(name: str, own: dict[str, str] = OF_ITS_OWN) -> Node:
        if name not in made:
            connector = kvferry("kv_both" if name == "prefill" else "kv_consumer", home.address)
            # These two cores are not quick.
            connector["kv_connector_extra_config"] |= {"role": "both", "prefix_wait": 2.0}
            made[name] = Node(
                model,
                folder / f"{name}.log",
                tp=2 if name == "decode" else 1,
                block=BLOCK[name],
                connector=connector,
                environment={**environment(), **own},
            )
        return made[name]

    yield make
    for node in made.values():
        node.close()


@pytest.fixture
def engines(engine: Callable[..., Node]) -> dict[str, Node]:
    """Prefill, decode and another decode."""
    started = {name: engine(name) for name in ("prefill", "decode", "other")}
    return {name: node if node.is_ready else node.ready() for name, node in started.items()}


def alone(node: Node, tokens: list[int]) -> list[int]:
    """What an engine says without anybody's help; it forgets it."""
    [answer] = node.generate(request(tokens, WHOLE))
    until(lambda: node.call("reset_prefix_cache"))
    return list(answer["tokens"])


def hint(node: Node) -> dict[str, Any]:
    """The parameters that name an engine as the source of a session."""
    [answer] = node.generate(request([3], 1, {PREFIX_SOURCE: None}))
    return {PREFIX_SOURCE: answer["params"][PREFIX_SOURCE]}


def reads(node: Node) -> int:
    return int(node.call("metric", "vllm:kvferry_read"))


def full_blocks(tokens: list[int], block: int) -> int:
    """Tokens of the full blocks of those that were computed: the last one that was generated was not."""
    return (len(tokens) - 1) // block * block


def test_session_moves_from_decode_to_decode_to_prefill(home: NodeServerProcess, engines: dict[str, Node]) -> None:
    """Of two ranks and blocks of 16, to one and 32, to one and 32."""
    prefill, decode, other = engines["prefill"], engines["decode"], engines["other"]
    tokens = prompt(1, 150)
    expected = alone(prefill, tokens)
    [params] = offered(prefill, [tokens])
    begun = decode.call("begin_answer", request(tokens, WHOLE, params), PART)
    decode.call("abort_begun")
    said, source = list(begun["tokens"]), decode
    before = {node: reads(node) for node in (other, prefill)}
    for node, count in ((other, PART), (prefill, WHOLE)):
        session = [*tokens, *said]
        begun = node.call("begin_answer", request(session, WHOLE - len(said), hint(source)), count)
        node.call("abort_begun")
        block = BLOCK["decode" if source is decode else "other"]
        assert begun["cached"] >= full_blocks(session, block)
        assert reads(node) == before[node] + 1
        said, source = [*said, *begun["tokens"]], node
        assert said == expected[: len(said)]
    assert said == expected
    until(lambda: pinned(home) == 0)


def test_prompt_moves_from_prefill_to_prefill(home: NodeServerProcess, engines: dict[str, Node]) -> None:
    """And from there to decode: of one rank and blocks of 32, to one and 32, to two and 16."""
    prefill, decode, other = engines["prefill"], engines["decode"], engines["other"]
    tokens = prompt(2, 200)
    expected = alone(prefill, tokens)
    prefill.call("abort", request(tokens, 1, PREFILL), 1)
    before = [reads(node) for node in (other, decode)]
    [answer] = other.generate(request(tokens, 1, {**PREFILL, **hint(prefill)}))
    assert answer["cached"] >= full_blocks(tokens, BLOCK["prefill"])
    [said] = decode.generate(request(tokens, WHOLE, answer["params"]))
    assert said["tokens"] == expected
    assert [reads(node) for node in (other, decode)] == [count + 1 for count in before]
    until(lambda: pinned(home) == 0)


def test_session_of_an_engine_that_dies_in_between_is_computed(
    home: NodeServerProcess, engines: dict[str, Node], engine: Callable[..., Node]
) -> None:
    """Last: it ends the engine of two ranks. The reader's steps are the test's."""
    decode, reader = engines["decode"], engine("reader", {}).ready()
    tokens = prompt(3, 150)
    expected = alone(reader, tokens)
    begun = decode.call("begin_answer", request(tokens, WHOLE), PART)
    decode.call("abort_begun")
    said = list(begun["tokens"])
    until(lambda: pinned(home) == 0)
    reader.call("begin", request([*tokens, *said], WHOLE - len(said), hint(decode)), 0)
    until(lambda: pinned(home) == 1)
    decode.close(signal.SIGKILL)
    assert reader.call("end_begun") == [expected[len(said) :], "length"]
    assert int(reader.call("metric", "vllm:kvferry_failed")) == 1


@pytest.fixture
def servers(home: NodeServerProcess, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two ``vllm serve`` of a model, both of which read and are read from."""
    model = make_model(tmp_path / "model", kv_heads=4)
    connector = kvferry("kv_both", home.address, kv_load_failure_policy="fail")
    connector["kv_connector_extra_config"]["prefix_wait"] = 2.0
    # For its /abort_requests.
    made = [
        Server(model, tmp_path / f"{name}.log", free_port(), connector, environment={"VLLM_SERVER_DEV_MODE": "1"})
        for name in ("first", "second")
    ]
    try:
        first, second = (server.ready() for server in made)
        yield first, second
    finally:
        for server in made:
            server.close()


def post(url: str, body: bytes = b"{}") -> Any:
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    return urllib.request.urlopen(asked, timeout=60)


def count(server: Server, name: str) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in server.metrics().splitlines()
        if line.startswith(f"vllm:kvferry_{name}_total")
    )


def test_stream_of_a_router_goes_on_at_another_server(servers: tuple[Server, Server], tmp_path: Path) -> None:
    """First the router empties its server, then somebody aborts what runs on the next one."""
    first, second = servers
    body = {
        "model": str(tmp_path / "model"),
        "prompt": prompt(4, 100),
        "temperature": 0,
        "max_tokens": 500,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    expected = second.complete({**body, "cache_salt": "another"})["choices"][0]["token_ids"]
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "session_router.py"), str(port), f"{first.url},{second.url}"]
    said: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as router:
        try:
            assert router.stdout is not None
            assert router.stdout.readline() == b"listening\n"
            url = f"http://127.0.0.1:{port}"
            with post(f"{url}/v1/completions", json.dumps(body).encode()) as stream:

                def read(tokens: int) -> None:
                    while len(said) < tokens and (line := stream.readline()):
                        if line.startswith(b"data: {"):
                            said.extend(*(choice["token_ids"] for choice in json.loads(line[6:])["choices"]))

                read(20)
                with post(f"{url}/empty", first.url.encode()) as emptied:
                    assert emptied.read() == b"empty\n"
                assert len(said) < 500
                read(len(said) + 50)
                post(f"{url}/fill", first.url.encode()).close()
                post(f"{second.url}/abort_requests").close()
                read(500)
                assert stream.read().strip() == b"data: [DONE]"
        finally:
            router.kill()
    assert said == expected
    assert [count(server, "read") for server in servers] == [1, 1]
    assert [count(server, "prefixes_missed") for server in servers] == [0, 0]
