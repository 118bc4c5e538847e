"""The planes of a rank of a vLLM engine, served only if tests or the self-check have shown that they are right.

The planes are made from vLLM's specs and tensors. In the self-check vLLM's own functions write into blocks that no
request has yet, see `kvferry.testing.check_layout`. The self-check runs once, on every rank, on the device, in
`register_kv_caches`: before the first request, and before CUDA graphs are captured. So far it has run on CPU only, with
vLLM's CPU kernels, and with its Triton kernels under Triton's interpreter.

Source of vLLM's functions that write: vllm-project/vllm 0.32.0, ``unified_kv_cache_update`` in
vllm/model_executor/layers/attention/attention.py, ``MLAAttention.update_kv_cache`` in mla_attention.py beside it,
``sparse_attn_indexer`` in vllm/model_executor/layers/sparse_attn_indexer.py, ``MambaBase.bind_kv_cache`` in
vllm/model_executor/layers/mamba/abstract.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import view_of
from kvferry.integrations.vllm.layouts.attention import Proof, family_of, layer_planes
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.shards import Layer, RankPlace, layers_of
from kvferry.testing.layout import CheckedLayout, Tokens, WriteTokens, check_layout

logger = logging.getLogger(__name__)

_INDEXER_GROUP = 128
"""Values of an indexer's key that share a scale: ``Indexer.quant_block_size`` in deepseek_v2.py."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of the layers of one kind."""

    backend: str  # or the class of the layers
    layers: tuple[str, ...]  # alike in backend, spec, strides and planes; the first of them was written to
    layout: CheckedLayout  # the compared components and blocks
    unwritten: str = ""
    """Why nothing was written, so that only strides, sizes and bounds were compared with the spec; else empty."""

    def __str__(self) -> str:
        listed = ("values", self.layout.values), ("footprint", self.layout.footprint)
        how = " and ".join(f"{what} of {', '.join(of)}" for what, of in listed if of)
        if not how:
            return f"{len(self.layers)} of {self.backend} by strides only ({self.unwritten})"
        return f"{len(self.layers)} of {self.backend} by {how} in blocks {', '.join(map(str, self.layout.blocks))}"


def checked_planes(
    vllm_config: Any, kv_cache_config: Any, setup: Setup, kv_caches: Mapping[str, torch.Tensor], place: RankPlace
) -> list[Plane]:
    """Return the planes of a rank's caches, ordered by group. Errors as `KvferryConnector.register_kv_caches`."""
    if not current_platform.is_cpu():
        logger.warning("kvferry was not run on %s yet: please report what you see", current_platform.device_name)
    layers = layers_of(vllm_config, kv_cache_config, setup.tables, kv_caches, place)
    planes = [plane for layer in layers for plane in layer_planes(layer)]
    reasons = {name: kind.unwritten for kind in self_check(layers, planes) for name in kind.layers}
    for layer in layers:
        # A state's spec alone describes its parts, and was compared with the module's own tensors.
        if isinstance(layer.spec, MambaSpec) or (family := family_of(layer)).proof is Proof.KERNEL:
            continue
        if reason := reasons[layer.name]:
            found = f"{family.name}, backend {layer.backend.rpartition('.')[2]}"
            expected = f"a layout that was tested, or that the self-check can write to ({reason})"
            raise InvalidField(f"KV cache of {layer.name}", found, expected)
    return planes


def self_check(layers: Sequence[Layer], planes: Sequence[Plane], seed: int | None = None) -> tuple[Checked, ...]:
    """Check the planes of a rank against vLLM's writes, log the result in one line, and return it by kind of layers.

    The first and the last layer are always written to. Nothing else may use the caches meanwhile. Waits for the device.
    `seed` is for the choice of blocks; None: other blocks at each start. Raises `LayoutMismatch`: the planes of a layer
    are wrong; do not read by them.
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
    level = logging.WARNING if any(kind.unwritten for kind in found) else logging.INFO
    took = time.perf_counter() - begin
    logger.log(level, "self-check: layers %s; %.3f s", "; ".join(map(str, found)), took)
    return tuple(found)


def _check(layer: Layer, planes: Sequence[Plane], names: tuple[str, ...], seed: int | None) -> Checked:
    """Check a layer by vLLM's writes; the result is that of all layers of these names."""
    attends = isinstance(layer.module, (Attention, MLAAttention))
    backend = layer.module.attn_backend.get_name() if attends else type(layer.module).__name__
    path = write_path(layer, planes)
    if isinstance(path, str):
        return Checked(backend, names, CheckedLayout(), path)
    try:
        if path.write is not None and path.token is not None:
            # Padding, which vLLM's kernels skip: at the first call a backend may prepare the whole cache, as Triton's
            # does for the scales of each token and head.
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
    except LayoutMismatch:
        raise
    except Exception as error:
        # If vLLM's function does not take these arguments, that does not disprove the planes.
        logger.exception("self-check: %s of %s could not be written", layer.name, backend)
        return Checked(backend, names, CheckedLayout(), f"vLLM's write failed: {error!r}")
    return Checked(backend, names, layout)


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


class WritePath(NamedTuple):
    """vLLM's way to write the cache of a layer."""

    write: WriteTokens | None = None  # see `check_layout`
    token: Tokens | None = None  # of zeros
    states: tuple[torch.Tensor, ...] = ()
    """The views by which vLLM's kernels write a recurrent state: the kernels take whole tensors."""


def write_path(layer: Layer, planes: Sequence[Plane]) -> WritePath | str:
    """Return vLLM's way to write the cache of a layer with these planes, or why there is no function that could be
    called on its own."""
    module = layer.module
    if module is None:
        return "vLLM has no layer of that name"
    cache = module.kv_cache
    if isinstance(module, MambaBase):
        return WritePath(states=cache) if isinstance(cache, tuple) else "its state is not bound"
    if not isinstance(cache, torch.Tensor) or cache.numel() == 0:
        return "its cache is not bound"
    # By name: importing the model's module would import all of its kernels.
    if "DeepseekV32IndexerCache" in [found.__name__ for found in type(module).__mro__]:
        return _fitting(_indexer(module), layer, planes, cache.shape[1])
    shared = getattr(module, "kv_sharing_target_layer_name", None)
    if shared is not None:
        return f"it reads what {shared} writes"
    update = getattr(getattr(module, "impl", None), "do_kv_cache_update", None)
    if update is None:
        return "its backend writes the cache inside attention"
    for kind, dimensions, path in ((Attention, 4, _attention), (MLAAttention, 3, _latent)):
        if isinstance(module, kind):
            if cache.dim() != dimensions:
                return f"its cache has the shape {tuple(cache.shape)}"
            return _fitting(path(module, update), layer, planes, cache.shape[dimensions - 2])
    return "the arguments of its write function are not known"


def _fitting(path: WritePath | str, layer: Layer, planes: Sequence[Plane], page_tokens: int) -> WritePath | str:
    """Add the layer's own tensors of a token to a path, if its slots are the tokens of vLLM's blocks."""
    if isinstance(path, str):
        return path
    if not isinstance(layer.spec, AttentionSpec) or any(plane.tokens_per_state != 1 for plane in planes):
        return "a state is not one token"
    held = layer.module.kv_cache.shape[0] * page_tokens
    tokens = layer.spec.block_size
    if tokens % page_tokens or held < layer.group.num_blocks * tokens:
        return f"kernel blocks of {page_tokens} tokens do not make blocks of {tokens}"
    dtype, device = layer.vllm_config.model_config.dtype, layer.cache.device
    return path._replace(token={name: zeros.to(device, dtype) for name, zeros in (path.token or {}).items()})


def _attention(module: Any, update: Any) -> WritePath:
    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        update(module, inputs["key"], inputs["value"], module.kv_cache, slots)

    widths = {"key": module.head_size, "value": module.head_size_v}
    return WritePath(write, {name: torch.zeros(module.num_kv_heads, width) for name, width in widths.items()})


def _latent(module: Any, update: Any) -> WritePath | str:
    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        latent, rope = inputs["latent"][:, 0], inputs["rope"]
        update(latent, rope, module.kv_cache, slots, module.kv_cache_dtype, module._k_scale)

    if getattr(module, "hisparse_cache", None) is not None:
        return "HiSparse keeps its cache elsewhere"
    widths = {"latent": module.kv_lora_rank, "rope": module.qk_rope_head_dim}
    return WritePath(write, {name: torch.zeros(1, width) for name, width in widths.items()})


def _indexer(module: Any) -> WritePath | str:
    """Return the path of CUDA's operation, which has never been run: there was no GPU."""
    shuffled = getattr(module, "uses_shuffled_layout", False)
    if shuffled or not current_platform.is_cuda() or module.kv_cache.dtype is not torch.uint8:
        return "its write operation is known on CUDA, for a cache of bytes, only"
    # A key of whole groups, and a float32 for each group.
    groups, rest = divmod(module.kv_cache.shape[-1], _INDEXER_GROUP + 4)
    if rest:
        return f"{module.kv_cache.shape[-1]} bytes of a token are no keys with scales"

    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.indexer_k_quant_and_cache(inputs["index"][:, 0], module.kv_cache, slots, _INDEXER_GROUP, "ue8m0")

    return WritePath(write, {"index": torch.zeros(1, groups * _INDEXER_GROUP)})
