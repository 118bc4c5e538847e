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
    """Return the identity of a cache's contents: with the model's name and configuration, not its path, which may
    differ between hosts.

    Args:
        model: path or name of the model.
        revision: of the model; None: unspecified.
        config: the model's own configuration, as transformers writes it.
        dtype: type in which the model computes, as torch names it.
        cache_dtype: the engine's setting for the type of the cache.
        quantization: of the model; None: not quantized.
    """
    # transformers adds its own version, which must not keep two sides apart that are upgraded in turn.
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
