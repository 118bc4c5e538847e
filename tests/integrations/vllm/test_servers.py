"""Two ``vllm serve``, and what the usual proxies for prefill and decode do between them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.vllm_engines import PREFILL, Server, kvferry, make_model, prompt

pytestmark = pytest.mark.timeout(1200)
"""Data-parallel ranks of two servers start a dozen processes."""


def test_usual_proxies_work(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=4)
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        servers = [
            Server(model, tmp_path / f"{role}.log", free_port(), kvferry(role, home.address))
            for role in ("kv_producer", "kv_consumer")
        ]
        try:
            prefill, decode = (server.ready() for server in servers)
            for seed in range(3):
                body: dict[str, Any] = {
                    "model": str(model),
                    "prompt": prompt(200 + seed, 90),
                    "temperature": 0,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                alone = decode.complete({**body, "cache_salt": "another"})["choices"][0]["token_ids"]
                # vLLM's toy proxy sends these, as for its own connector.
                asked = {
                    **PREFILL,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                }
                first = prefill.complete({**body, "max_tokens": 1, "kv_transfer_params": asked})
                params = first["kv_transfer_params"]
                answer = decode.complete({**body, "kv_transfer_params": params})
                assert answer["choices"][0]["token_ids"] == alone
            assert decode.metric("vllm:kvferry_read_total") == 3
            assert prefill.metric("vllm:kvferry_published_total") == 3
        finally:
            for server in servers:
                server.close()


def test_data_parallel_ranks_are_engines(tmp_path: Path) -> None:
    """Every rank of decode reads from every rank of prefill."""
    model = make_model(tmp_path / "model", kv_heads=4)
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        servers = [
            Server(
                model,
                tmp_path / f"{role}.log",
                free_port(),
                kvferry(role, home.address, engine_id=role, kv_load_failure_policy="fail"),
                "--data-parallel-size",
                "2",
            )
            for role in ("kv_producer", "kv_consumer")
        ]
        try:
            prefill, decode = (server.ready() for server in servers)
            for source, destination in product(range(2), repeat=2):
                body: dict[str, Any] = {
                    "model": str(model),
                    "prompt": prompt(300 + 10 * source + destination, 90),
                    "temperature": 0,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                alone = prefill.complete({**body, "cache_salt": "another"}, source)["choices"][0]["token_ids"]
                first = prefill.complete({**body, "max_tokens": 1, "kv_transfer_params": PREFILL}, source)
                answer = decode.complete({**body, "kv_transfer_params": first["kv_transfer_params"]}, destination)
                assert answer["choices"][0]["token_ids"] == alone
            for rank in range(2):
                assert prefill.metric(f'vllm:kvferry_published_total{{engine="{rank}"') == 2
                assert decode.metric(f'vllm:kvferry_read_total{{engine="{rank}"') == 2
        finally:
            for server in servers:
                server.close()
