"""SGLang decodes requests that vLLM has prefilled.

SGLang keeps K by token, and vLLM's attention on CPU permutes it inside a page. So a real vLLM is refused here, by name;
and caches in the layout of vLLM's backends for GPUs are filled with what a prefill instance of SGLang computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvferry import Blocks, Client, EngineSpec, Group, router_reference
from kvferry.geometry import shard
from kvferry.geometry.formats import vllm_attention
from kvferry.geometry.tensors import Holding
from kvferry.integrations.first_token import first_token_payload
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.sglang.bootstrap import Source, room_reference
from kvferry.integrations.sglang.settings import LAYER_NAMES
from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import Instance, named, served, some_room
from tests.support.vllm_engines import PREFILL, Node, kvferry, prompt, request
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

HEADS, DIM, LAYERS, BLOCK, RANKS = 2, 32, 4, 32, 2


@pytest.fixture(scope="module")
def instances(
    model: Path, home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Instance, Instance]]:
    folder = tmp_path_factory.mktemp("instances")
    both = [
        Instance(model, folder / f"{mode}.log", mode, home.address, environment={"KVFERRY_ENGINE_ID": f"sglang-{mode}"})
        for mode in ("prefill", "decode")
    ]
    try:
        prefill, decode = (instance.ready() for instance in both)
        yield prefill, decode
    finally:
        for instance in both:
            instance.close()


def carried(reference: str, room: int) -> dict[str, Any]:
    """Return a router's additions to a request that another make of engine has prefilled."""
    return {"bootstrap_host": reference, "bootstrap_port": 1, "bootstrap_room": room}


class Relay:
    """An engine of two ranks with vLLM's caches: blocks of 32 tokens, K and V side by side for each head.

    Args:
        address: address of its node server.
        model: folder of the model.
    """

    def __init__(self, address: str, model: Path) -> None:
        group = Group("full", block_tokens=BLOCK, num_blocks=16, null_block=0)
        described = SimpleNamespace(revision=None, dtype="torch.float32", quantization=None)
        config = AutoConfig.from_pretrained(model).to_dict()
        spec = EngineSpec("vllm", (group,), RANKS, cache_identity(model, described, config, "auto"))
        self.client = Client(address)
        self.session = self.client.open_engine(spec)
        self.caches = []
        for rank in range(RANKS):
            held = shard(rank, RANKS, HEADS)
            tensors = {LAYER_NAMES.format(layer): torch.zeros(16, len(held), BLOCK, 2 * DIM) for layer in range(LAYERS)}
            planes = vllm_attention(tensors, group, Holding(held, HEADS), DIM)
            self.caches.append(self.client.register_cache(spec, rank, tensors=tensors, planes=planes))

    def read(self, reference: str, blocks: list[int]) -> None:
        """Read on both ranks."""
        reads = [
            cache.read(reference, {"full": Blocks(blocks)}, read_id="relay", parties=RANKS) for cache in self.caches
        ]
        for read in reads:
            read.result(60)


def test_caches_of_vllm_are_decoded_token_for_token(
    instances: tuple[Instance, Instance], home: NodeServerProcess, model: Path
) -> None:
    """Of another tensor-parallel size and block size, under a router's reference that decode has before anything is
    published; the first token comes with the payload."""
    prefill, decode = instances
    text, blocks = prompt(3, 75), [7, 2, 9]
    wanted = served(prefill, decode, some_room(), text)["output_ids"]
    relay, room = Relay(home.address, model), some_room()
    reference = router_reference(home.address, "vllm")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(decode.generate, text, **carried(reference, some_room()))
        computed = pool.submit(prefill.generate, text, **named(prefill, room))
        relay.read(room_reference(Source("sglang-prefill", home.address), room), blocks)
        computed.result()
        payload = first_token_payload(wanted[0], 75)
        relay.session.publish("r", {"full": Blocks(blocks, end_token=75)}, payload=payload, reference=reference)
        assert asked.result()["output_ids"] == wanted
    publication = relay.session.publish("s", {"full": Blocks(blocks, end_token=75)}, payload=payload)
    later = decode.generate(text, **carried(publication.reference, some_room()))
    assert later["output_ids"] == wanted
    bare = relay.session.publish("t", {"full": Blocks(blocks, end_token=75)})
    assert "no first token" in str(decode.generate(text, **carried(bare.reference, some_room())))
    until(lambda: pinned(home) == 0)
    relay.client.close()


def test_vllm_on_cpu_is_refused_by_name(
    instances: tuple[Instance, Instance], home: NodeServerProcess, model: Path, tmp_path: Path
) -> None:
    vllm = Node(model, tmp_path / "vllm.log", block=32, connector=kvferry("kv_producer", home.address))
    try:
        text = prompt(4, 75)
        (answer,) = vllm.ready().generate(request(text, 1, PREFILL))
        refused = instances[1].generate(text, **carried(answer["params"]["kvferry_reference"], some_room()))
        assert "Incompatible" in str(refused)
        assert "vllm-cpu-column-major" in str(refused)
        assert "plain" in str(refused)
    finally:
        vllm.close()
