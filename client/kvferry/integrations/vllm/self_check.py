"""The check that a vLLM engine makes before it serves: what vLLM writes is found where the planes say, and only there.

The planes are made from vLLM's specs and tensors. Here vLLM itself says whether they are right, see
`kvferry.testing.check_layout`: its own functions write into blocks that no request has yet. It runs once, on every
rank, on the device, in `register_kv_caches`: before the first request, and before CUDA graphs are captured.

Run on CPU only so far, with vLLM's CPU kernels, and with its Triton kernels under Triton's interpreter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import view_of
from kvferry.integrations.vllm.layouts import Layer
from kvferry.integrations.vllm.write_paths import write_path
from kvferry.testing.layout import CheckedLayout, check_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """How the layers of one kind were checked.

    Attributes:
        backend: the backend, or the class of the layers.
        layers: names of the layers, alike in backend, spec, strides and planes. The first of them was written to.
        layout: what was compared, and in which blocks.
        unwritten: why nothing was written, so that strides, sizes and bounds alone were compared with the spec; else
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
    """What a self-check has checked.

    Attributes:
        kinds: the kinds of layers. The first and the last layer are written to in any case.
        seconds: how long it took.
    """

    kinds: tuple[Checked, ...]
    seconds: float

    def __str__(self) -> str:
        return f"self-check: layers {'; '.join(map(str, self.kinds))}; {self.seconds:.3f} s"


def self_check(layers: Sequence[Layer], planes: Sequence[Plane], seed: int | None = None) -> Report:
    """Check the planes of a rank against what vLLM writes, and log the result in one line.

    Nothing else may use the caches meanwhile. It waits for the device.

    Args:
        layers: the layers of the rank.
        planes: their planes.
        seed: of the blocks that are drawn; None: others at each start.

    Raises:
        LayoutMismatch: the planes of a layer are wrong; nothing may be read by them.
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
    """Let vLLM write the cache of a layer, which stands for those of these names."""
    path = write_path(layer, planes)
    reason = path.reason
    if not reason:
        try:
            if path.write is not None and path.token is not None:
                # Padding, which vLLM's kernels skip: with its first call a backend may prepare the whole cache, as
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
            # A function of vLLM that does not take these arguments is no proof against the planes.
            logger.exception("self-check: %s of %s could not be written", layer.name, path.name)
            reason = f"vLLM's write failed: {error!r}"
    return Checked(path.name, names, CheckedLayout(), reason)


def _kind(layer: Layer, planes: Sequence[Plane]) -> tuple[Any, ...]:
    """Return what is equal for layers of which it is enough to write to one."""
    module, view = layer.module, view_of(layer.cache)
    cache = getattr(module, "kv_cache", None)
    tensors = cache if isinstance(cache, tuple) else (cache,) if isinstance(cache, torch.Tensor) else ()
    bound = tuple((found.data_ptr() - view.address, found.shape, found.stride(), found.dtype) for found in tensors)
    settings = tuple(getattr(module, name, None) for name in ("kv_cache_dtype", "num_kv_heads", "head_size", "isa"))
    declared = tuple(plane.moved("alike", plane.base - view.address) for plane in planes)
    memory = layer.group.num_blocks, view.shape, view.strides, view.dtype
    return type(module), type(getattr(module, "impl", None)), settings, bound, repr(layer.spec), memory, declared


def _content_bytes(spec: Any) -> int:
    """Return the bytes of a block without padding, as the spec of a layer says."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.page_size_bytes)
