"""Tests that move KV cache in the memory of GPUs; CONTRIBUTING.md says how to run them, and what each of them shows."""
