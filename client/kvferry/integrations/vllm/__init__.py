"""vLLM's KV connector for kvferry: moves the KV cache from prefill to decode instances of any tensor-parallel sizes.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.integrations.vllm",
      "kv_role": "kv_producer", "kv_buffer_device": "cpu",
      "kv_connector_extra_config": {"address": "unix:/run/kvferry/node.sock"}}'

Use ``kv_consumer`` for decode instances. A node server, ``kvferryd``, must run at each address. The router passes
``kv_transfer_params`` on; they contain one reference.

Tested with vLLM 0.32.0 on CPU. Other platforms are refused, because their memory layouts have not been checked.
"""

from kvferry.integrations.vllm.connector import KvferryConnector as KvferryConnector
