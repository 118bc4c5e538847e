"""Tests that move KV cache in the memory of GPUs; CONTRIBUTING.md explains how to run them, and what each shows."""
