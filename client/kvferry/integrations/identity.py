"""The identity of a cache's contents, which engines of one make and of different makes compare before they read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cache_identity(name: object, model: Any, config: Mapping[str, object], cache_dtype: object) -> dict[str, str]:
    """Return the identity of a cache's contents, without the model's path, which may differ between hosts. `name` is
    that path, or a name; `model` the engine's configuration of the model, with revision, dtype and quantization;
    `config` the model's own, as transformers writes it; `cache_dtype` the engine's setting."""
    # transformers adds its own version, which must not keep two sides apart that are upgraded in turn.
    described = {key: of for key, of in config.items() if not key.startswith("_") and key != "transformers_version"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": Path(str(name)).name,
        "revision": str(model.revision or ""),
        "config": digest[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache_dtype),
        "quantization": str(model.quantization or ""),
    }
