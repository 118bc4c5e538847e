"""Tests that move KV cache in the memory of GPUs; docs/gpu.md says how to run them, and what each of them shows."""
