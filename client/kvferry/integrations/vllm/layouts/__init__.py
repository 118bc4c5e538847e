"""vLLM's KV caches as planes: strides from the tensor, meaning from the layer's spec and its attention backend. Unknown
specs and backends are refused."""
