"""The identity of a cache, which engines of all makes compare before a read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.identity import cache_identity

CONFIG = {"model_type": "llama", "rope_theta": 1e4, "transformers_version": "4.57.1", "_name_or_path": "/models/here"}


def identity(model: str = "/models/here/llama", config: dict[str, Any] | None = None, **changed: Any) -> dict[str, str]:
    given = {"revision": None, "dtype": "torch.bfloat16", "quantization": None, "cache_dtype": "auto", **changed}
    cache_dtype = given.pop("cache_dtype")
    return cache_identity(model, SimpleNamespace(**given), config or CONFIG, cache_dtype)


def test_identity_names_the_model_and_the_types() -> None:
    found = identity()
    assert (found["model"], found["dtype"], found["cache_dtype"]) == ("llama", "bfloat16", "auto")


def test_identity_does_not_depend_on_the_host() -> None:
    """Neither on the model's path nor on the version of transformers, which adds both to the configuration."""
    there = {**CONFIG, "transformers_version": "5.0.0", "_name_or_path": "/models/there"}
    assert identity("/models/there/llama", there) == identity()
    del there["transformers_version"]
    assert identity("/models/there/llama", there) == identity()


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "/models/here/llama-2"},
        {"config": {**CONFIG, "rope_theta": 1e6}},
        {"revision": "v2"},
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_identity_depends_on_everything_that_the_values_depend_on(changed: dict[str, Any]) -> None:
    assert identity(**changed) != identity()
