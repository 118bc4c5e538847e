"""The worker of vLLM's NixlConnector alone, on a cache of ours: vLLM's own classes, NIXL and first contact, without a
model or an engine. Only in vLLM's environment; written for vLLM 0.32.

vLLM keeps K and V of a layer in one page. It is told of each of our planes as a layer of half the head size, so that
kvferry and it move the same blocks.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlHandshakePayload,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
    base_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from benchmarks.caches import CacheMemory, Ids, Layout
from benchmarks.destinations import STEP_PAUSE, TIMEOUT

SOURCE = "benchmark-source"
OFFERED = 120.0
"""Seconds for which the source keeps blocks that nobody reads."""


class PullWorker:
    """A rank's worker, with its cache registered.

    Args:
        memory: its cache.
        engine: its name; that of the source is `SOURCE`.
        port: where the source answers first contact.
    """

    def __init__(self, memory: CacheMemory, engine: str, port: int) -> None:
        self.memory = memory
        self.offered: set[str] = set()
        """Requests whose blocks have not been read yet."""
        self._port = port
        base: Any = base_worker
        base.get_tensor_model_parallel_rank = lambda: 0
        base.get_tensor_model_parallel_world_size = lambda: 1
        # vLLM's attention for CPUs takes larger blocks only; none runs here.
        base.select_common_block_size = lambda block_size, *_: block_size
        planes = [f"model.layers.{index}.self_attn.attn" for index in range(len(memory.words))]
        spec = FullAttentionSpec(
            block_size=memory.layout.block_tokens,
            num_kv_heads=memory.heads,
            head_size=memory.layout.head_dim // 2,
            dtype=torch.bfloat16,
        )
        cache = KVCacheConfig(
            num_blocks=memory.layout.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(planes, spec)]
        )
        cores = os.sched_getaffinity(0)
        config = _config(memory.layout, engine)
        with set_current_vllm_config(config):
            self._worker: Any = NixlPullConnectorWorker(config, engine, cache)
            self._worker.register_kv_caches(dict(zip(planes, _pages(memory), strict=True)))
        # It keeps itself to one core, and its source to the same one where both are on one machine.
        os.sched_setaffinity(0, cores)
        if engine == SOURCE:
            mine = self._worker.xfer_handshake_metadata
            self._scheduler: Any = NixlPullConnectorScheduler(config, engine, cache)
            payload = NixlHandshakePayload(mine.compatibility_hash, mine.agent_metadata_bytes)
            self._scheduler.set_xfer_handshake_metadata({(0, 0): payload})

    def offer(self, request: str) -> None:
        """Keep the blocks of a request until they were read, as after a prefill."""
        step = NixlConnectorMetadata()
        step.scheduler_clock = time.perf_counter()
        step.reqs_in_batch = {request}
        step.reqs_to_send = {request: time.perf_counter() + OFFERED}
        self._worker.start_load_kv(step)
        self.offered.add(request)

    def step(self) -> None:
        """What the source's engine asks in each step."""
        self.offered -= set(self._worker.get_transfer_results().finished_sending)

    def read(self, request: str, theirs: Ids, mine: Ids) -> float:
        """Read a request's blocks, in steps as those of kvferry's engine; the seconds that it took.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        step = NixlConnectorMetadata()
        step.add_new_req_to_recv(
            request_id=request,
            local_block_ids=(mine.tolist(),),
            local_num_computed_blocks=(0,),
            awaiting_kvs=True,
            kv_transfer_params={
                "remote_block_ids": (theirs.tolist(),),
                "remote_engine_id": SOURCE,
                "remote_request_id": request,
                "remote_host": "127.0.0.1",
                "remote_port": self._port,
                "tp_size": 1,
                "remote_num_tokens": len(theirs) * self.memory.layout.block_tokens,
            },
        )
        began = time.perf_counter()
        self._worker.start_load_kv(step)
        while time.perf_counter() < began + TIMEOUT:
            results = self._worker.get_transfer_results()
            if request in results.finished_recving:
                took = time.perf_counter() - began
                if results.failed_recving:
                    break
                return took
            if not self._worker._ready_requests.empty():
                # First contact is made: the next step begins to read.
                self._worker.start_load_kv(NixlConnectorMetadata())
            time.sleep(STEP_PAUSE)
        raise RuntimeError(f"NixlConnector's worker did not read {request}")


def _pages(memory: CacheMemory) -> list[torch.Tensor]:
    """The planes as vLLM has layers: ``[blocks, heads, tokens, K and V]``."""
    layout = memory.layout
    shape = (layout.num_blocks, memory.heads, layout.block_tokens, layout.head_dim)
    # torch has no unsigned words.
    return [torch.from_numpy(plane.view("int16")).view(torch.bfloat16).view(shape) for plane in memory.words]


def _config(layout: Layout, engine: str) -> VllmConfig:
    """vLLM's configuration of an engine whose model has this cache, and no weights."""
    head_size = layout.head_dim // 2
    with tempfile.TemporaryDirectory() as folder:
        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": layout.heads * head_size,
            "intermediate_size": 1024,
            "num_hidden_layers": 2 * layout.layers,
            "num_attention_heads": layout.heads,
            "num_key_value_heads": layout.heads,
            "head_dim": head_size,
            "max_position_embeddings": 131_072,
            "vocab_size": 32_000,
            "torch_dtype": "bfloat16",
            "rms_norm_eps": 1e-5,
        }
        (Path(folder) / "config.json").write_text(json.dumps(model))
        described = ModelConfig(model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=32_768)
    # Compared at first contact.
    described.model = "benchmark"
    cache = CacheConfig(block_size=layout.block_tokens, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    role = "kv_producer" if engine == SOURCE else "kv_consumer"
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu", engine_id=engine)
    return VllmConfig(
        model_config=described,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=32_768, max_model_len=32_768, is_encoder_decoder=False
        ),
        kv_transfer_config=transfer,
    )
