"""vLLM's kernels run on CPU tensors here, and believe that they are on a GPU of compute capability 9.0."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(autouse=True)
def capable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses tile sizes, and whether fp8 exists, by the device's capability."""
    import torch
    from vllm.platforms import current_platform

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda *arguments, **named: True)
