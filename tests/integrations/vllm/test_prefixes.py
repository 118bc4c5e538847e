"""The beginning of a prompt that one real vLLM engine has in its prefix cache, read by another."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, pinned
from tests.support.vllm_versions import MINOR
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(MINOR < 32, reason="not run with this vLLM yet"),
]
BLOCK = 32
OF_ITS_OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine has a process and a loop of its own, as in a server, and waits there for requests and questions."""


@pytest.fixture
def engines(home: NodeServerProcess, tmp_path: Path) -> Iterator[Callable[..., tuple[Node, Node]]]:
    """Start a source and a reader; the reader fails what reads of publications leave."""
    nodes: list[Node] = []

    def make() -> tuple[Node, Node]:
        model = make_model(tmp_path / "model", kv_heads=4)
        for name, role, environment in (("source", "kv_both", OF_ITS_OWN), ("reader", "kv_consumer", {})):
            connector = kvferry(role, home.address, kv_load_failure_policy="fail")
            # These two cores are not quick.
            connector["kv_connector_extra_config"]["prefix_wait"] = 2.0
            log = tmp_path / f"{name}.log"
            nodes.append(Node(model, log, block=BLOCK, connector=connector, environment=environment))
        return nodes[0].ready(), nodes[1].ready()

    yield make
    for node in nodes:
        node.close()


def computed(source: Node, *prompts: list[int]) -> tuple[list[list[int]], str]:
    """Compute prompts; what was said, and the engine's reference."""
    answers = source.generate(*(request(tokens, 12, {PREFIX_SOURCE: None}) for tokens in prompts))
    [reference] = {answer["params"][PREFIX_SOURCE] for answer in answers}
    return [answer["tokens"] for answer in answers], reference


def test_prefix_of_another_engine_is_read_and_the_rest_computed(
    home: NodeServerProcess, engines: Callable[..., tuple[Node, Node]]
) -> None:
    source, reader = engines()
    prompts = [prompt(1, 6 * BLOCK + 8), prompt(2, 4 * BLOCK), prompt(3, 5 * BLOCK + 1)]
    expected, reference = computed(source, *prompts)

    def hinted(tokens: list[int]) -> dict[str, Any]:
        return request(tokens, 12, {PREFIX_SOURCE: reference})

    def count(name: str) -> int:
        return int(reader.call("metric", f"vllm:kvferry_{name}"))

    # The source has no requests, and sleeps. All blocks that it has of each, but the last token, are read.
    answers = reader.generate(*(hinted(tokens) for tokens in prompts))
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [6 * BLOCK, 4 * BLOCK - 1, 5 * BLOCK]
    assert (count("prefixes_asked"), count("prefixes_missed"), count("read"), count("failed")) == (3, 0, 3, 0)
    until(lambda: pinned(home) == 0)
    # What was read is in the reader's cache: it asks for nothing.
    [answer] = reader.generate(hinted(prompts[2]))
    assert (answer["tokens"], answer["cached"]) == (expected[2], 5 * BLOCK)
    assert count("prefixes_asked") == 3
    # A prompt that goes on otherwise, and one that the source does not have.
    for tokens, cached in (([*prompt(4, 3 * BLOCK), *prompt(5, 50)], 3 * BLOCK), (prompt(6, 150), 0)):
        if cached:
            computed(source, tokens[:cached])
        [answer] = reader.generate(hinted(tokens))
        assert answer["cached"] == cached
        assert [answer["tokens"]] == alone(source, [tokens])
    assert (count("read"), count("prefixes_missed"), count("failed")) == (4, 1, 0)
    # The samples of a prompt are read once.
    sampled = prompt(9, 3 * BLOCK + 3)
    several: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}
    [first] = source.generate(request(sampled, 12, **several))
    [answer] = reader.generate(request(sampled, 12, {PREFIX_SOURCE: reference}, **several))
    assert answer["samples"] == first["samples"]
    assert (count("read"), count("prefixes_missed"), count("failed")) == (5, 1, 0)
    # A source that dies between its answer and the read: computed, although the reader's policy is to fail.
    last = prompt(7, 6 * BLOCK)
    [wanted], _ = computed(source, last)
    until(lambda: pinned(home) == 0)
    reader.call("begin", hinted(last), 0)
    until(lambda: pinned(home) == 1)
    source.close(signal.SIGKILL)
    assert reader.call("end_begun") == [wanted, "length"]
    # And one that is not there.
    gone = prompt(8, 100)
    [answer] = reader.generate(hinted(gone))
    assert [answer["tokens"]] == alone(reader, [gone])
    assert (count("read"), count("failed"), count("prefixes_missed")) == (5, 1, 2)
