"""LoRA adapters for SGLang on CPU.

SGLang's `torch_native` backend of LoRA computes on CPUs, but keeps some of its tensors in pinned memory, which torch
has only where there is a device. `register` gives it ordinary memory instead; SGLang loads it as a plug-in, in each of
its processes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.vllm_engines import plugged

RANK = 4


def environment() -> dict[str, str]:
    """What an instance's environment has beside the usual one."""
    return plugged("sglang.srt.plugins", __name__)


def arguments() -> list[str]:
    """What an instance's command line has, so that adapters of `make_adapter` can be loaded."""
    arguments = ["--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK)]
    return [*arguments, "--lora-target-modules", "q_proj", "v_proj"]


def make_adapter(folder: Path, seed: int, *, hidden: int = 128, layers: int = 4, values: int = 64) -> Path:
    """An adapter of random weights, for a model of `tests.support.vllm_engines.make_model` with two KV heads."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for module, rows in (("q_proj", hidden), ("v_proj", values)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn(rows, RANK) * 0.5
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def register() -> None:
    """Let torch take ordinary memory where it is asked for pinned memory."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*given: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*given, **named)

        return made

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
