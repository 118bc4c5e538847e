"""The connector for vLLM, in a real vLLM: `make test-vllm`."""
