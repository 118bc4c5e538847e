"""A connector that declares K where V is, and V where K is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.geometry import Plane
from kvferry.integrations.vllm import KvferryConnector, checked_planes
from kvferry.integrations.vllm.layouts.attention import layer_planes
from kvferry.integrations.vllm.shards import Layer

OTHER = {"key": "value", "value": "key"}


class WrongConnector(KvferryConnector):
    """See the module."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Declare wrong planes."""
        vars(checked_planes)["layer_planes"] = wrong_planes
        super().register_kv_caches(kv_caches)


def wrong_planes(layer: Layer) -> tuple[Plane, ...]:
    return tuple(replace(plane, component=OTHER[plane.component]) for plane in layer_planes(layer))
