"""The planes of a rank of a vLLM engine, served only if tests or the self-check have shown that they are right."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.groups import BlockTable, layer_spec, transferred
from kvferry.integrations.vllm.layouts import Layer, backend_of, family_of, layer_planes
from kvferry.integrations.vllm.self_check import Report, self_check
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.shards import RankPlace, holding

logger = logging.getLogger(__name__)


def checked_planes(
    vllm_config: Any, kv_cache_config: Any, setup: Setup, kv_caches: Mapping[str, torch.Tensor], place: RankPlace
) -> list[Plane]:
    """Return the planes of a rank's caches, ordered by group.

    Raises:
        LayoutMismatch: vLLM writes elsewhere than the planes say.
        InvalidField: the layout of a layer is not known; or no test has shown it, and the self-check could not.
    """
    if not current_platform.is_cpu():
        logger.warning("kvferry was not run on %s yet: please report what you see", current_platform.device_name)
    layers = layers_of(vllm_config, kv_cache_config, setup.tables, kv_caches, place)
    planes = [plane for layer in layers for plane in layer_planes(layer)]
    report = self_check(layers, planes) if setup.settings.self_check else None
    check_shown(layers, report)
    return planes


def layers_of(
    vllm_config: Any,
    kv_cache_config: Any,
    tables: Sequence[BlockTable],
    kv_caches: Mapping[str, torch.Tensor],
    place: RankPlace,
) -> list[Layer]:
    """Return the layers of a rank, ordered by group.

    Layers that share the cache of another are in no group; layers of other pipeline stages have no tensor here.
    """
    found: list[Layer] = []
    for table, (_, listed) in zip(tables, transferred(kv_cache_config), strict=True):
        for name in listed.layer_names:
            if name in kv_caches:
                spec = layer_spec(listed, name)
                held = holding(spec, name, vllm_config, place)
                # The spec of a state says all about it.
                backend = "" if isinstance(spec, MambaSpec) else backend_of(vllm_config, name)
                found.append(Layer(name, kv_caches[name], spec, table.group, held, vllm_config, backend))
    return found


def check_shown(layers: Sequence[Layer], report: Report | None) -> None:
    """Raise `InvalidField` for a layer whose layout neither the tests nor the self-check have shown to be right.

    Args:
        layers: the layers of the rank.
        report: what the self-check has checked; None: it was turned off.
    """
    unwritten = {name: kind.unwritten for kind in report.kinds for name in kind.layers} if report is not None else {}
    for layer in layers:
        # What a state consists of is in its spec alone, and compared with the module's own tensors.
        if isinstance(layer.spec, MambaSpec) or family_of(layer).proven:
            continue
        reason = unwritten.get(layer.name, "self_check is false")
        if reason:
            family = f"{family_of(layer).name}, backend {layer.backend.rpartition('.')[2]}"
            expected = f"a layout that was tested, or that the self-check can write to ({reason})"
            raise InvalidField(f"KV cache of {layer.name}", family, expected)
