"""These tests need vLLM, which is in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# Read by Triton when it is imported, which vLLM does: its kernels then run on host memory.
os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    # Before anything imports vLLM: tests/integrations/vllm/layouts runs its Triton kernels.
    import tests.integrations.vllm.layouts.interpreter  # noqa: F401


def pytest_report_header(config: pytest.Config) -> str:
    """Say why nothing is collected."""
    return "" if find_spec("vllm") else "tests/integrations/vllm: left out, vLLM is not installed here (make test-vllm)"
