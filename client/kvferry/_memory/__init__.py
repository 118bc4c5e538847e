"""Memory that holds KV cache: what may be registered, and permuting, summing and clearing parts of it."""
