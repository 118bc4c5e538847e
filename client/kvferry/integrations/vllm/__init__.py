"""vLLM's KV connector for kvferry: moves the KV cache from prefill to decode instances of any tensor-parallel sizes.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KvferryConnector", "kv_role": "kv_producer",
      "kv_connector_extra_config": {"address": "unix:/run/kvferry/node.sock"}}'

Use ``kv_consumer`` for decode instances. A node server, ``kvferryd``, must run at each address. The router passes
``kv_transfer_params`` on; they contain one reference. `docs/vllm.md` has all settings.

Tested on CPU with vLLM 0.32.0, and in parts with 0.31.0: `docs/vllm.md` says what was run.

The connector is loaded on first use: vLLM imports this package in each of its processes, to register the connector's
name, even without this connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.integrations.vllm.connector import KvferryConnector as KvferryConnector

__all__ = ["KvferryConnector"]


def __getattr__(name: str) -> object:
    if name != "KvferryConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.integrations.vllm.connector import KvferryConnector

    return KvferryConnector
