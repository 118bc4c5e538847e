"""The planes of a rank of a vLLM engine, served only if tests or the self-check have shown that they are right.

The planes are made from vLLM's specs and tensors. In the self-check vLLM's own functions write into blocks that no
request has yet, see `kvferry.testing.check_layout`. The self-check runs once, on every rank, on the device, in
`register_kv_caches`: before the first request, and before CUDA graphs are captured. So far it has run on CPU only, with
vLLM's CPU kernels, and with its Triton kernels under Triton's interpreter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import view_of
from kvferry.integrations.vllm.groups import BlockTable, layer_spec, transferred
from kvferry.integrations.vllm.layouts import Layer, backend_of, family_of, layer_planes
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.shards import RankPlace, holding
from kvferry.integrations.vllm.write_paths import write_path
from kvferry.testing.layout import CheckedLayout, check_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of the layers of one kind.

    Attributes:
        backend: the backend, or the class of the layers.
        layers: names of the layers, alike in backend, spec, strides and planes. The first of them was written to.
        layout: the compared components and blocks.
        unwritten: why nothing was written, so that only strides, sizes and bounds were compared with the spec; else
            empty.
    """

    backend: str
    layers: tuple[str, ...]
    layout: CheckedLayout
    unwritten: str = ""

    def __str__(self) -> str:
        listed = ("values", self.layout.values), ("footprint", self.layout.footprint)
        how = " and ".join(f"{what} of {', '.join(of)}" for what, of in listed if of)
        if not how:
            return f"{len(self.layers)} of {self.backend} by strides only ({self.unwritten})"
        return f"{len(self.layers)} of {self.backend} by {how} in blocks {', '.join(map(str, self.layout.blocks))}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a self-check, by kind of layers, with its duration in seconds. The first and the last layer are
    always written to."""

    kinds: tuple[Checked, ...]
    seconds: float

    def __str__(self) -> str:
        return f"self-check: layers {'; '.join(map(str, self.kinds))}; {self.seconds:.3f} s"


def checked_planes(
    vllm_config: Any, kv_cache_config: Any, setup: Setup, kv_caches: Mapping[str, torch.Tensor], place: RankPlace
) -> list[Plane]:
    """Return the planes of a rank's caches, ordered by group. Errors as `KvferryConnector.register_kv_caches`."""
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
                # The spec of a state is complete without a backend.
                backend = "" if isinstance(spec, MambaSpec) else backend_of(vllm_config, name)
                found.append(Layer(name, kv_caches[name], spec, table.group, held, vllm_config, backend))
    return found


def check_shown(layers: Sequence[Layer], report: Report | None) -> None:
    """Raise `InvalidField` for a layer whose layout neither the tests nor the self-check have shown to be right.
    Without a report, the self-check is off."""
    unwritten = {name: kind.unwritten for kind in report.kinds for name in kind.layers} if report is not None else {}
    for layer in layers:
        # A state's spec alone describes its parts, and was compared with the module's own tensors.
        if isinstance(layer.spec, MambaSpec) or family_of(layer).proven:
            continue
        reason = unwritten.get(layer.name, "self_check is false")
        if reason:
            family = f"{family_of(layer).name}, backend {layer.backend.rpartition('.')[2]}"
            expected = f"a layout that was tested, or that the self-check can write to ({reason})"
            raise InvalidField(f"KV cache of {layer.name}", family, expected)


def self_check(layers: Sequence[Layer], planes: Sequence[Plane], seed: int | None = None) -> Report:
    """Check the planes of a rank against vLLM's writes, and log the result in one line.

    Nothing else may use the caches meanwhile. Waits for the device. `seed` is for the choice of blocks; None: other
    blocks at each start. Raises `LayoutMismatch`: the planes of a layer are wrong; do not read by them.
    """
    begin = time.perf_counter()
    by_layer: dict[str, list[Plane]] = {layer.name: [] for layer in layers}
    for plane in planes:
        if plane.layer not in by_layer:
            raise LayoutMismatch(plane.layer, f"{plane.component} is declared, but the rank has no such layer")
        by_layer[plane.layer].append(plane)
    kinds: dict[Any, list[Layer]] = {}
    for layer in layers:
        own = by_layer[layer.name]
        if not own:
            raise LayoutMismatch(layer.name, "no planes are declared for it")
        check_layout(layer.group, layer.cache, own, block_bytes=_content_bytes(layer.spec))
        kinds.setdefault(_kind(layer, own), []).append(layer)
    found = []
    # vLLM makes its caches in this mode, outside of which they may not be changed.
    with torch.inference_mode():
        for alike in kinds.values():
            written = [alike[0], *(layer for layer in alike[1:] if layer is layers[-1])]
            names = tuple(layer.name for layer in alike)
            results = [_check(layer, by_layer[layer.name], names, seed) for layer in written]
            found.append(next((each for each in results if each.unwritten), results[0]))
    report = Report(tuple(found), time.perf_counter() - begin)
    unwritten = any(kind.unwritten for kind in report.kinds)
    logger.log(logging.WARNING if unwritten else logging.INFO, "%s", report)
    return report


def _check(layer: Layer, planes: Sequence[Plane], names: tuple[str, ...], seed: int | None) -> Checked:
    """Check a layer by vLLM's writes; the result is that of all layers of these names."""
    path = write_path(layer, planes)
    reason = path.reason
    if not reason:
        try:
            if path.write is not None and path.token is not None:
                # Padding, which vLLM's kernels skip: at the first call a backend may prepare the whole cache, as
                # Triton's does for the scales of each token and head.
                padding = torch.full((1,), -1, dtype=torch.int64, device=layer.cache.device)
                path.write({name: zeros[None] for name, zeros in path.token.items()}, padding)
            layout = check_layout(
                layer.group,
                layer.cache,
                planes,
                write=path.write,
                token=path.token,
                states=path.states,
                block_bytes=_content_bytes(layer.spec),
                seed=seed,
            )
            return Checked(path.name, names, layout)
        except LayoutMismatch:
            raise
        except Exception as error:
            # If vLLM's function does not take these arguments, that does not disprove the planes.
            logger.exception("self-check: %s of %s could not be written", layer.name, path.name)
            reason = f"vLLM's write failed: {error!r}"
    return Checked(path.name, names, CheckedLayout(), reason)


def _kind(layer: Layer, planes: Sequence[Plane]) -> tuple[Any, ...]:
    """Return a key of layers that are alike, so that a check writes to only one of them."""
    module, view = layer.module, view_of(layer.cache)
    cache = getattr(module, "kv_cache", None)
    tensors = cache if isinstance(cache, tuple) else (cache,) if isinstance(cache, torch.Tensor) else ()
    bound = tuple((found.data_ptr() - view.address, found.shape, found.stride(), found.dtype) for found in tensors)
    settings = tuple(getattr(module, name, None) for name in ("kv_cache_dtype", "num_kv_heads", "head_size", "isa"))
    declared = tuple(plane.moved("alike", plane.base - view.address) for plane in planes)
    memory = layer.group.num_blocks, view.shape, view.strides, view.dtype
    return type(module), type(getattr(module, "impl", None)), settings, bound, repr(layer.spec), memory, declared


def _content_bytes(spec: Any) -> int:
    """Return the bytes of a block without padding, by the spec of a layer."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.page_size_bytes)
