"""The check that a vLLM engine makes before it serves: what vLLM writes is found where the planes say, and only there.

The planes are made from vLLM's specs and tensors. Here vLLM itself says whether they are right: its own functions write
known values into blocks that no request has yet, and the planes are followed, address by address, to what was written.
It runs once, on every rank, on the device, in `register_kv_caches`: before the first request, and before CUDA graphs
are captured. The memory is put back as it was.

Run on CPU only so far, with vLLM's CPU kernels, and with its Triton kernels under Triton's interpreter.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from kvferry.errors import LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts import Layer
from kvferry.integrations.vllm.self_check.states import check_states
from kvferry.integrations.vllm.self_check.structure import check_structure, pattern
from kvferry.integrations.vllm.self_check.tokens import check_tokens
from kvferry.integrations.vllm.self_check.write_paths import NoPath, StatePath, TokenPath, write_path

logger = logging.getLogger(__name__)

MORE_BLOCKS = 4
"""Blocks that are drawn at each start, beside one of the first and the last: a kernel may write others elsewhere."""


@dataclass(frozen=True, slots=True)
class Checked:
    """How the layers of one kind were checked.

    Attributes:
        backend: the backend, or the class of the layers.
        layers: names of the layers, alike in backend, spec, strides and planes. The first of them was written to.
        values: components whose bytes were compared with what vLLM was given to write.
        footprint: components of which it was checked that vLLM's writes change their bytes, and no others.
        unwritten: why nothing was written, so that strides, sizes and bounds alone were compared with the spec; else
            empty.
        blocks: ids of the blocks that were written to.
    """

    backend: str
    layers: tuple[str, ...]
    values: tuple[str, ...] = ()
    footprint: tuple[str, ...] = ()
    unwritten: str = ""
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = [
            f"{what} of {', '.join(of)}" for what, of in (("values", self.values), ("footprint", self.footprint)) if of
        ]
        if not how:
            return f"{len(self.layers)} of {self.backend} by strides only ({self.unwritten})"
        blocks = ", ".join(map(str, self.blocks))
        return f"{len(self.layers)} of {self.backend} by {' and '.join(how)} in blocks {blocks}"


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


def self_check(layers: Sequence[Layer], planes: Sequence[Plane], vllm_config: Any, seed: int | None = None) -> Report:
    """Check the planes of a rank against what vLLM writes, and log the result in one line.

    Nothing else may use the caches meanwhile. It waits for the device.

    Args:
        layers: the layers of the rank.
        planes: their planes.
        vllm_config: vLLM's configuration, which has its layers.
        seed: of the blocks that are drawn; None: others at each start.

    Raises:
        LayoutMismatch: the planes of a layer are wrong; nothing may be read by them.
    """
    begin = time.perf_counter()
    check_structure(layers, planes)
    modules = vllm_config.compilation_config.static_forward_context
    kinds: dict[Any, list[int]] = {}
    by_layer: dict[str, list[Plane]] = {layer.name: [] for layer in layers}
    for plane in planes:
        by_layer[plane.layer].append(plane)
    for index, layer in enumerate(layers):
        kind = _kind(layer, by_layer[layer.name], modules.get(layer.name))
        kinds.setdefault(kind, []).append(index)
    found = []
    draw = random.Random(seed)
    # vLLM makes its caches in this mode, outside of which they may not be changed.
    with torch.inference_mode():
        for members in kinds.values():
            written = [members[0], *({len(layers) - 1} & set(members[1:]))]
            names = tuple(layers[index].name for index in members)
            results: list[Checked] = []
            for index in written:
                layer = layers[index]
                blocks = _spare(layer, draw)
                results.append(_check(layer, by_layer[layer.name], vllm_config, names, blocks, alike=bool(results)))
            found.append(next((each for each in results if each.unwritten), results[0]))
    report = Report(tuple(found), time.perf_counter() - begin)
    unwritten = any(kind.unwritten for kind in report.kinds)
    logger.log(logging.WARNING if unwritten else logging.INFO, "%s", report)
    return report


def _kind(layer: Layer, planes: Sequence[Plane], module: Any) -> tuple[Any, ...]:
    """Return what is equal for layers of which it is enough to check one."""
    cache = getattr(module, "kv_cache", None)
    tensors = cache if isinstance(cache, tuple) else (cache,) if isinstance(cache, torch.Tensor) else ()
    registered: Any = layer.cache
    base = registered.data_ptr()
    bound = tuple((found.data_ptr() - base, found.shape, found.stride(), found.dtype) for found in tensors)
    settings = tuple(getattr(module, name, None) for name in ("kv_cache_dtype", "num_kv_heads", "head_size", "isa"))
    implementation = type(getattr(module, "impl", None))
    return type(module), implementation, settings, bound, pattern(layer, planes)


def _check(
    layer: Layer,
    planes: Sequence[Plane],
    vllm_config: Any,
    names: tuple[str, ...],
    blocks: Sequence[int],
    *,
    alike: bool,
) -> Checked:
    module = vllm_config.compilation_config.static_forward_context.get(layer.name)
    path = write_path(module, vllm_config.model_config.dtype)
    reason = path.reason if isinstance(path, NoPath) else _unfit(layer, planes, path)
    values: list[str] = []
    if not reason:
        try:
            if isinstance(path, TokenPath):
                values = check_tokens(layer, planes, path, blocks, alike=alike)
            elif isinstance(path, StatePath):
                values = check_states(layer, planes, path, blocks)
        except LayoutMismatch:
            raise
        except Exception as error:
            # A function of vLLM that does not take these arguments is no proof against the planes.
            logger.exception("self-check: %s of %s could not be written", layer.name, path.name)
            reason = f"vLLM's write failed: {error!r}"
    if reason:
        return Checked(path.name, names, unwritten=reason)
    rest = tuple(plane.component for plane in planes if plane.component not in values)
    return Checked(path.name, names, tuple(values), rest, blocks=tuple(sorted(blocks)))


def _spare(layer: Layer, draw: random.Random) -> list[int]:
    """Return two blocks far apart, so that a wrong distance of blocks shows, and then some others. No block is in use
    yet; the null block is left out if there are others."""
    ids = [block for block in (1, 0, layer.group.num_blocks - 1) if block < layer.group.num_blocks]
    usable = [block for block in ids if block != layer.group.null_block] or ids
    ends = sorted({usable[0], usable[-1]})
    between = range(ends[0] + 1, ends[-1])
    drawn = draw.sample(between, min(MORE_BLOCKS, len(between)))
    return [*ends, *(block for block in drawn if block != layer.group.null_block)]


def _unfit(layer: Layer, planes: Sequence[Plane], path: TokenPath | StatePath) -> str:
    """Why a write path cannot be used for a layer; else empty."""
    if isinstance(path, StatePath):
        return ""
    if not isinstance(layer.spec, AttentionSpec) or any(plane.tokens_per_state != 1 for plane in planes):
        return "a state is not one token"
    if layer.spec.block_size % path.page_tokens or path.cache.shape[0] * path.page_tokens < (
        layer.group.num_blocks * layer.spec.block_size
    ):
        return f"kernel blocks of {path.page_tokens} tokens do not make blocks of {layer.spec.block_size}"
    return ""
