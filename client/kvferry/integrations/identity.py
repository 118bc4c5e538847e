"""The identity of a cache's contents, which engines of one make and of different makes compare before they read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


def cache_identity(
    model: object,
    revision: object,
    config: Mapping[str, object],
    *,
    dtype: object,
    cache_dtype: object,
    quantization: object,
) -> dict[str, str]:
    """Return the identity of a cache's contents. It has the model's name and configuration, not its path, which may
    differ between hosts.

    Args:
        model: path or name of the model.
        revision: its revision; None: none was asked for.
        config: its own configuration, as transformers writes it.
        dtype: what the model computes in, as torch names it.
        cache_dtype: the engine's setting for what the cache holds.
        quantization: how the model is quantized; None: it is not.
    """
    # transformers adds its own version: two sides that are upgraded in turn still go together.
    left_out = {"transformers_version"}
    described = {key: value for key, value in config.items() if not key.startswith("_") and key not in left_out}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": Path(str(model)).name,
        "revision": str(revision or ""),
        "config": digest[:16],
        "dtype": str(dtype).removeprefix("torch."),
        "cache_dtype": str(cache_dtype),
        "quantization": str(quantization or ""),
    }
