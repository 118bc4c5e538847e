"""Replays the requests of routers and sidecars to prefill and decode, two ``vllm serve``.

They were written for vLLM's NixlConnector, and are used unchanged. Requests are those of the projects' public code of
August and September 2026; the projects themselves are not run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from kvferry import Client, router_reference
from tests.integrations.vllm.router_requests import ASKED, NULLS, ROUTERS, Router
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.vllm_engines import Server, kvferry, make_model, prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

STEPS = ("--max-num-batched-tokens", "160")
"""Longer prompts are computed in several steps. Not so three samples of 90 tokens, two of which find two blocks in the
cache: vLLM on CPU takes no seed where it computes a prompt in chunks."""


class Pair:
    """Two servers that publish and read, so that each can be prefill and decode: by vLLM's role, and by ours."""

    def __init__(self, model: Path, folder: Path, address: str) -> None:
        self.model = str(model)
        extra = {"address": address, "role": "both"}
        both = {
            "p": kvferry("kv_consumer", address, engine_id="p", kv_connector_extra_config=extra),
            "d": kvferry("kv_both", address, engine_id="d"),
        }
        self.servers = [
            Server(model, folder / f"{name}.log", free_port(), transfer, *STEPS) for name, transfer in both.items()
        ]

    def ready(self) -> Pair:
        """Wait until both serve."""
        self.prefill, self.decode = (server.ready() for server in self.servers)
        return self

    def body(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        """A client's request."""
        common = {"model": self.model, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        return {**common, "prompt": tokens, **fields}

    def alone(self, tokens: list[int], **fields: Any) -> list[int]:
        """Return the answer of one server with an empty prefix cache."""
        answer = self.prefill.complete(self.body(tokens, cache_salt="another", **fields))
        return list(answer["choices"][0]["token_ids"])


def counter(server: Server, name: str) -> float:
    """A counter at ``/metrics``, over all labels."""
    lines = server.metrics().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:kvferry_{name}"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    # Nothing here waits for the end of a hold.
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True, hold=600) as server:
        yield server


@pytest.fixture(scope="module")
def pair(home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(make_model(folder / "model", kv_heads=4), folder, home.address)
    try:
        yield pair.ready()
    finally:
        for server in pair.servers:
            server.close()


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.name)
def test_a_router_for_vllms_own_connector_is_used_unchanged(
    pair: Pair, home: NodeServerProcess, router: Router
) -> None:
    tokens = prompt(300 + ROUTERS.index(router), 90)
    before = [counter(pair.decode, name) for name in ("read_total", "bytes_total")]
    first = pair.prefill.complete({**pair.body(tokens), **router.limits, "kv_transfer_params": router.asks})
    params = first["kv_transfer_params"]
    # Routers check only that there are parameters to forward.
    assert params["do_remote_prefill"] is True
    answer = pair.decode.complete({**pair.body(tokens), "kv_transfer_params": {**params, **router.adds}})
    assert answer["choices"][0]["token_ids"] == pair.alone(tokens)
    reads, size = (
        counter(pair.decode, name) - old for name, old in zip(("read_total", "bytes_total"), before, strict=True)
    )
    # Decode has read it all, but the last token, which it computes.
    assert reads == 1
    assert size >= 89 * BYTES_PER_TOKEN
    until(lambda: pinned(home) == 0)


def test_samples_of_a_prompt_are_published_and_read_once(pair: Pair, home: NodeServerProcess) -> None:
    """Routers forward ``n`` to both sides, and vLLM makes a request of each sample."""
    tokens = prompt(400, 90)
    before = [
        counter(pair.prefill, "published_total"),
        counter(pair.decode, "read_total"),
        counter(pair.decode, "bytes"),
    ]
    first = pair.prefill.complete(
        pair.body(tokens, n=3, temperature=1.0, seed=1, max_tokens=1, kv_transfer_params={**ASKED, **NULLS})
    )
    sampled = {"n": 3, "temperature": 1.0, "seed": 5}
    answer = pair.decode.complete(pair.body(tokens, **sampled, kv_transfer_params=first["kv_transfer_params"]))
    alone = pair.prefill.complete(pair.body(tokens, **sampled, cache_salt="another"))
    samples = [[choice["token_ids"] for choice in each["choices"]] for each in (answer, alone)]
    assert samples[0] == samples[1]
    assert len({tuple(sample) for sample in samples[0]}) == 3
    after = [
        counter(pair.prefill, "published_total"),
        counter(pair.decode, "read_total"),
        counter(pair.decode, "bytes"),
    ]
    assert [new - old for new, old in zip(after[:2], before[:2], strict=True)] == [1, 1]
    # Nothing stays pinned until the end of the hold.
    until(lambda: pinned(home) == 0)


def test_late_sample_takes_the_blocks_of_the_others(pair: Pair, home: NodeServerProcess) -> None:
    """vLLM's front end sends one sample after the other, and the first may have been read before the last arrives. The
    server's policy would fail it, because the publication is released."""
    tokens = prompt(410, 90)
    first = pair.prefill.complete(pair.body(tokens, max_tokens=1, kv_transfer_params=ASKED))
    read, alone = counter(pair.decode, "read_total"), pair.alone(tokens)
    for _ in range(2):
        answer = pair.decode.complete(pair.body(tokens, kv_transfer_params=first["kv_transfer_params"]))
        assert answer["choices"][0]["token_ids"] == alone
        until(lambda: pinned(home) == 0)
    assert counter(pair.decode, "read_total") == read + 1


def test_a_conversation_goes_back_and_forth(pair: Pair, home: NodeServerProcess) -> None:
    """Decode publishes what it has generated, and prefill reads it for the next turn instead of computing it."""
    question, answered = prompt(500, 70), 60
    first = pair.prefill.complete(pair.body(question, max_tokens=1, kv_transfer_params=ASKED))
    # Decode is asked to publish, too: the router sets this beside what it forwards.
    asked = {**first["kv_transfer_params"], "do_remote_decode": True}
    turn = pair.decode.complete(pair.body(question, max_tokens=answered, kv_transfer_params=asked))
    said = turn["choices"][0]["token_ids"]
    # The next turn: prefill reads from decode, computes the new tokens, and decode reads from prefill.
    whole = [*question, *said, *prompt(501, 20)]
    read = counter(pair.prefill, "bytes_total")
    back = {**turn["kv_transfer_params"], "do_remote_decode": True}
    second = pair.prefill.complete(pair.body(whole, max_tokens=1, kv_transfer_params=back))
    final = pair.decode.complete(pair.body(whole, kv_transfer_params=second["kv_transfer_params"]))
    assert final["choices"][0]["token_ids"] == pair.alone(whole)
    # Two blocks of the question, which prefill had already, were not read; keys are read in whole blocks.
    tokens = (counter(pair.prefill, "bytes_total") - read) / BYTES_PER_TOKEN
    assert 0 < tokens <= 5 * 32 - 2 * 32
    until(lambda: pinned(home) == 0)


def test_a_conversation_is_not_continued_from_another_answer(pair: Pair, home: NodeServerProcess) -> None:
    """The client has changed what decode has said, or its text was cut into tokens otherwise. The question is the
    same, but what was published goes on otherwise: the server's policy fails the read, and its cache is as before."""
    question = prompt(510, 70)
    first = pair.prefill.complete(pair.body(question, max_tokens=1, kv_transfer_params=ASKED))
    asked = {**first["kv_transfer_params"], "do_remote_decode": True}
    turn = pair.decode.complete(pair.body(question, max_tokens=60, kv_transfer_params=asked))
    said = turn["choices"][0]["token_ids"]
    changed = [*question, *said[:30], said[30] ^ 1, *said[31:], *prompt(511, 20)]
    back = turn["kv_transfer_params"]
    with pytest.raises(HTTPError, match="500"):
        pair.prefill.complete(pair.body(changed, kv_transfer_params=back))
    assert pair.prefill.complete(pair.body(changed))["choices"][0]["token_ids"] == pair.alone(changed)
    whole = [*question, *said, *prompt(511, 20)]
    answer = pair.prefill.complete(pair.body(whole, kv_transfer_params=back))
    assert answer["choices"][0]["token_ids"] == pair.alone(whole)
    until(lambda: pinned(home) == 0)


def at_once(pair: Pair, mine: dict[str, Any], theirs: dict[str, Any], decode: Server | None = None) -> tuple[Any, Any]:
    """Return the answers of both servers to simultaneous requests; an `HTTPError` for a refusal."""

    def ask(server: Server, body: dict[str, Any]) -> Any:
        try:
            return server.complete(body)
        except HTTPError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, decode or pair.decode, theirs), pool.submit(ask, pair.prefill, mine)]
        decoded, prefilled = (each.result() for each in asked)
    return prefilled, decoded


def test_a_router_asks_both_servers_at_the_same_time(pair: Pair, home: NodeServerProcess) -> None:
    """Also for the next turn of a conversation, which prefill reads from decode while decode reads from it."""
    question, answered = prompt(600, 300), 60
    first, second = (router_reference(home.address, "p") for _ in range(2))
    mine = pair.body(question, max_tokens=1, kv_transfer_params={**ASKED, "kvferry_reference": first})
    reads = {"do_remote_prefill": True, "kvferry_reference": first}
    theirs = pair.body(question, max_tokens=answered, kv_transfer_params={**reads, "do_remote_decode": True})
    read = [counter(server, "read_total") for server in pair.servers]
    _, turn = at_once(pair, mine, theirs)
    said = turn["choices"][0]["token_ids"]
    assert said == pair.alone(question, max_tokens=answered)
    whole = [*question, *said, *prompt(601, 150)]
    back = {**turn["kv_transfer_params"], "do_remote_decode": True, "kvferry_publish_as": second}
    mine = pair.body(whole, max_tokens=1, kv_transfer_params=back)
    theirs = pair.body(whole, kv_transfer_params={**reads, "kvferry_reference": second})
    _, final = at_once(pair, mine, theirs)
    assert final["choices"][0]["token_ids"] == pair.alone(whole)
    assert [counter(server, "read_total") - old for server, old in zip(pair.servers, read, strict=True)] == [1, 2]
    until(lambda: pinned(home) == 0)


def test_server_can_be_prefill_and_decode_of_a_request(pair: Pair, home: NodeServerProcess) -> None:
    """A router that takes turns gives both to the same server at times. The server's policy would fail what cannot be
    read; it reads nothing, and takes the prompt from vLLM's prefix cache."""
    server = pair.prefill
    before = [counter(server, name) for name in ("read_total", "failed_total", "not_granted_total")]
    tokens = prompt(630, 90)
    first = server.complete(pair.body(tokens, max_tokens=1, kv_transfer_params=ASKED))
    later = server.complete(pair.body(tokens, kv_transfer_params=first["kv_transfer_params"]))
    assert later["choices"][0]["token_ids"] == pair.alone(tokens)
    longer, reference = prompt(631, 500), router_reference(home.address, "p")
    mine = pair.body(longer, max_tokens=1, kv_transfer_params={**ASKED, "kvferry_reference": reference})
    theirs = pair.body(longer, kv_transfer_params={"do_remote_prefill": True, "kvferry_reference": reference})
    _, answer = at_once(pair, mine, theirs, decode=server)
    assert answer["choices"][0]["token_ids"] == pair.alone(longer)
    assert [counter(server, name) for name in ("read_total", "failed_total", "not_granted_total")] == before
    until(lambda: pinned(home) == 0)


def test_router_declines_requests_that_prefill_refuses(pair: Pair, home: NodeServerProcess) -> None:
    """vLLM's front end refuses a request before the connector hears of it. Decode waits until the router says so."""
    tokens, reference = prompt(610, 90), router_reference(home.address, "p")
    refused = pair.body(tokens, max_tokens=-1, kv_transfer_params={**ASKED, "kvferry_reference": reference})
    theirs = pair.body(tokens, kv_transfer_params={"do_remote_prefill": True, "kvferry_reference": reference})
    with ThreadPoolExecutor(1) as pool, Client(home.address) as client:
        decoded = pool.submit(pair.decode.complete, theirs)
        with pytest.raises(HTTPError, match="400"):
            pair.prefill.complete(refused)
        client.decline(reference)
        # The server's policy is to fail the request; long before its timeout of two minutes.
        with pytest.raises(HTTPError, match="500"):
            decoded.result(60)


def test_engine_survives_any_parameters_of_clients(pair: Pair, home: NodeServerProcess) -> None:
    """What cannot be a reference is refused like one that is damaged, by the server's policy; what else has a wrong
    type is ignored."""
    tokens, wrong = prompt(620, 40), (17, True, ["kvf1."], {"a": [1]}, "kvf1.\n\x00", "x" * 5000)
    for value in wrong:
        reads = {"do_remote_prefill": True, "kvferry_reference": value, "kvferry_traceparent": value}
        with pytest.raises(HTTPError, match="500"):
            pair.decode.complete(pair.body(tokens, max_tokens=2, kv_transfer_params=reads))
        asked = {**ASKED, "kvferry_reference": value, "kvferry_publish_as": value, "kvferry_traceparent": value}
        answer = pair.prefill.complete(pair.body(tokens, max_tokens=1, kv_transfer_params=asked))
        with Client(home.address) as client:
            client.decline(answer["kv_transfer_params"]["kvferry_reference"])
    until(lambda: pinned(home) == 0)
    alone = pair.alone(tokens)
    assert pair.decode.complete(pair.body(tokens))["choices"][0]["token_ids"] == alone


BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4
"""4 layers, K and V, 4 heads of 32 numbers of 4 bytes."""
