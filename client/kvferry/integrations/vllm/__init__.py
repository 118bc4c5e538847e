"""kvferry in vLLM: a KV connector that moves prefill's cache to decode, whatever their tensor-parallel sizes.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.integrations.vllm",
      "kv_role": "kv_producer", "kv_buffer_device": "cpu",
      "kv_connector_extra_config": {"address": "unix:/run/kvferry/node.sock"}}'

and the same with ``kv_consumer`` on the other side. A node server, ``kvferryd``, has to run at each address. What
passes through the router is ``kv_transfer_params``, in which there is one reference.

Tested with vLLM 0.32.0 on CPU; other platforms are refused until somebody has checked their layouts.
"""

from kvferry.integrations.vllm.connector import KvferryConnector as KvferryConnector
