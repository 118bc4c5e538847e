"""An engine of another make reads what a prefill instance of SGLang has in its radix cache."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvferry import Blocks, Client, EngineSpec, Group, Prompt, Read
from kvferry.errors import PrefixMiss
from kvferry.geometry import shard
from kvferry.geometry.formats import vllm_attention
from kvferry.geometry.tensors import Holding
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.sglang.bootstrap import Source, room_reference
from kvferry.integrations.sglang.manager import PREFIX_SOURCE
from kvferry.integrations.sglang.settings import LAYER_NAMES
from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import PAGE, Instance, named, some_room
from tests.support.vllm_engines import Node, kvferry, prompt, request
from tests.support.vllm_flash_attention import environment
from tests.support.vllm_requests import alone, pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

HEADS, DIM, LAYERS, BLOCK, BLOCKS = 2, 32, 4, 32, 40
TEXT = prompt(1, 200)
CACHE = 512
"""Tokens that the engines have room for."""
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 4


class Reader:
    """An engine with vLLM's caches: blocks of 32 tokens, K and V side by side for each head."""

    def __init__(self, client: Client, home: NodeServerProcess, model: Path) -> None:
        group = Group("full", block_tokens=BLOCK, num_blocks=BLOCKS, null_block=0)
        described = SimpleNamespace(revision=None, dtype="torch.float32", quantization=None)
        config = AutoConfig.from_pretrained(model).to_dict()
        spec = EngineSpec("reader", (group,), 1, cache_identity(model, described, config, "auto"))
        self.tensors = {
            LAYER_NAMES.format(layer): torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM) for layer in range(LAYERS)
        }
        planes = vllm_attention(self.tensors, group, Holding(shard(0, 1, HEADS), HEADS), DIM)
        self.cache = client.register_cache(spec, 0, tensors=self.tensors, planes=planes)
        self.home = home
        self.reference = ""

    def read_request(
        self,
        prefill: Instance,
        tokens: list[int],
        first: int,
        name: str = "prefill",
        source: object = None,
        **more: Any,
    ) -> Any:
        """Let prefill compute a request, and read it as decode would; returns prefill's answer. `source`: an engine
        that may have its prefix."""
        room = some_room()
        sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": {PREFIX_SOURCE: source}}
        asked = {"input_ids": tokens, "sampling_params": sampling, **named(prefill, room), **more}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(prefill.post, "/generate", asked)
            reference = room_reference(Source(name, self.home.address), room)
            self.cache.read(reference, {"full": blocks(tokens, first)}).result(60)
            found = answer.result()
        [self.reference] = found["meta_info"][PREFIX_SOURCE]
        return found

    def fetch(self, tokens: list[int], first: int) -> Read:
        return self.cache.fetch(self.reference, Prompt(tokens), {"full": blocks(tokens, first)}, wait=2.0)

    def of(self, first: int, tokens: int) -> torch.Tensor:
        """The bytes of so many tokens in the blocks from `first` on."""
        count = -(-tokens // BLOCK)
        listed = [tensor[first : first + count].transpose(1, 2).flatten(0, 1) for tensor in self.tensors.values()]
        return torch.stack(listed)[:, :tokens].clone()


def blocks(tokens: list[int], first: int) -> Blocks:
    return Blocks([*range(first, first + -(-len(tokens) // BLOCK))])


def flushed(prefill: Instance) -> bool:
    """Whether SGLang has emptied its cache, which it does if it has nothing to do."""
    try:
        with urllib.request.urlopen(f"{prefill.url}/flush_cache", b""):
            return True
    except urllib.error.HTTPError:
        return False


@pytest.fixture(scope="module")
def prefill(
    request: pytest.FixtureRequest, model: Path, home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    """A prefill instance of this tensor-parallel size."""
    more = ["--max-total-tokens", str(CACHE), "--chunked-prefill-size", "64"]
    environment = {"KVFERRY_ENGINE_ID": "prefill", "KVFERRY_PREFIX_SHARE": "1"}
    log = tmp_path_factory.mktemp("prefill") / "log"
    made = Instance(model, log, "prefill", home.address, *more, tp=request.param, environment=environment)
    try:
        yield made.ready()
    finally:
        made.close()


@pytest.mark.parametrize("prefill", [1, 2], indirect=True)
def test_cached_prefix_is_read_from_prefill(prefill: Instance, model: Path, home: NodeServerProcess) -> None:
    """By several at once, as far as it is cached: not of other tokens, of another namespace, evicted, or flushed."""
    with Client(home.address) as client:
        reader = Reader(client, home, model)
        reader.read_request(prefill, TEXT, 1)
        whole = len(TEXT) // PAGE * PAGE
        wanted = reader.of(1, whole)
        assert wanted.any(-1).all()
        reads = [reader.fetch(TEXT, first) for first in (8, 15, 22)]
        for read, first in zip(reads, (8, 15, 22), strict=True):
            assert read.result(60).end_token == whole
            assert torch.equal(reader.of(first, whole), wanted)
        # One that goes on elsewhere within a page.
        result = reader.fetch([*TEXT[: 3 * PAGE + 5], 7, 8, 9], 29).result(60)
        assert result.end_token == 3 * PAGE
        assert torch.equal(reader.of(29, 3 * PAGE), wanted[:, : 3 * PAGE])

        def missed(tokens: list[int]) -> str:
            error = reader.fetch(tokens, 29).exception(60)
            assert isinstance(error, PrefixMiss)
            return str(error.values["why"])

        other, namespaced = prompt(2, 100), prompt(3, 100)
        assert missed(other) == "NOT_CACHED"
        reader.read_request(prefill, namespaced, 29, extra_key="tenant")
        assert missed(namespaced) == "NOT_CACHED"
        # Others take the room.
        for seed in range(10, 14):
            reader.read_request(prefill, prompt(seed, 300), 29)
        assert missed(TEXT) == "NOT_CACHED"
        last = prompt(13, 300)
        assert reader.fetch(last, 29).result(60).end_token == len(last) // PAGE * PAGE
        until(lambda: pinned(home) == 0)
        until(lambda: flushed(prefill))
        assert missed(last) == "NOT_CACHED"
    assert "leak" not in prefill.log.read_text()


@pytest.mark.parametrize("prefill", [1], indirect=True)
def test_vllm_reads_the_cached_prefix_and_computes_the_rest(
    prefill: Instance, model: Path, home: NodeServerProcess, tmp_path: Path
) -> None:
    """Token for token what it says alone. Its FlashAttention backend has the cache of GPUs."""
    connector = kvferry("kv_consumer", home.address)
    # These two cores are not quick.
    connector["kv_connector_extra_config"]["prefix_wait"] = 2.0
    small: dict[str, Any] = {"kv_cache_memory_bytes": CACHE * TOKEN_BYTES, "max_model_len": CACHE // 2}
    vllm = Node(model, tmp_path / "log", connector=connector, environment=environment(), **small)
    try:
        [wanted] = alone(vllm.ready(), [TEXT])
        # They take the room in vLLM's own cache.
        alone(vllm, [prompt(seed, CACHE // 2 - 20) for seed in (20, 21, 22)])
        with Client(home.address) as client:
            reader = Reader(client, home, model)
            reader.read_request(prefill, TEXT[:150], 1)
        [answer] = vllm.generate(request(TEXT, 12, {PREFIX_SOURCE: reader.reference}))
        assert (answer["tokens"], answer["cached"]) == (wanted, 150 // PAGE * PAGE)
        assert vllm.call("metric", "vllm:kvferry_prefixes_missed") == 0
    finally:
        vllm.close()
    until(lambda: pinned(home) == 0)
    assert "leak" not in prefill.log.read_text()


@pytest.mark.parametrize("prefill", [1], indirect=True)
def test_prefill_reads_the_cached_prefix_of_another_prefill_and_computes_the_rest(
    prefill: Instance, model: Path, home: NodeServerProcess, tmp_path: Path
) -> None:
    """On two ranks, into SGLang's radix cache, which has it for the next request, too."""
    log, environment = tmp_path / "log", {"KVFERRY_ENGINE_ID": "other", "KVFERRY_PREFIX_WAIT": "2"}
    other = Instance(model, log, "prefill", home.address, "--enable-metrics", tp=2, environment=environment)
    try:
        other.ready()
        with Client(home.address) as client:
            reader = Reader(client, home, model)
            reader.read_request(prefill, TEXT[:150], 1)
            source, cached = reader.reference, 150 // PAGE * PAGE
            wanted = reader.of(1, cached)
            # Without a source, SGLang computes all of it.
            text = [*prompt(5, 100), 3]
            assert reader.read_request(other, text, 8, "other")["meta_info"]["cached_tokens"] == 0
            assert reader.read_request(other, prompt(6, 200), 8, "other", source)["meta_info"]["cached_tokens"] == 0
            answer = reader.read_request(other, TEXT, 15, "other", source)
            assert answer["meta_info"]["cached_tokens"] == cached
            read = reader.of(15, len(TEXT))
            assert torch.equal(read[:, :cached], wanted)
            answer = reader.read_request(other, TEXT, 22, "other", source)
            assert answer["meta_info"]["cached_tokens"] == len(TEXT) // PAGE * PAGE
            # What was computed after the prefix is what is computed after a prefix of one's own.
            reader.read_request(prefill, TEXT, 1)
            assert torch.allclose(read, reader.of(1, len(TEXT)), atol=1e-4)
        assert other.counted("kvferry_reader_bytes") == cached * TOKEN_BYTES
        assert other.counted("kvferry_reader_reads", outcome="done") == 1
        until(lambda: pinned(home) == 0)
        assert "leak" not in log.read_text()
    finally:
        other.close()
    assert "leak" not in prefill.log.read_text()
