"""The self-check against vLLM's own layers and kernels: right planes pass, wrong ones are refused, nothing is left."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import vllm.triton_utils
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.ops import triton_reshape_and_cache_flash

from kvferry import EngineSpec, WorkerPort
from kvferry.errors import BadGeometry, LayoutMismatch
from kvferry.geometry import Interval, Plane, formats
from kvferry.geometry.tensors import Part, planes_of_tensor
from kvferry.integrations.vllm.checked_planes import Checked, self_check
from kvferry.integrations.vllm.layouts.attention import layer_planes
from kvferry.integrations.vllm.shards import Layer
from kvferry.testing import Fabric
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model
from tests.support.vllm_layers import Rank, attention, bound, config_of, latent, mamba

Change = Callable[[Plane], Plane]
Meaning = npt.NDArray[np.int64]


def declared(rank: Rank) -> list[Plane]:
    """The planes that the connector declares."""
    return [plane for layer in rank.layers for plane in layer_planes(layer)]


def packed(rank: Rank) -> list[Plane]:
    """The planes of vLLM's layout on GPUs."""
    return [
        plane
        for layer in rank.layers
        for plane in formats.vllm_attention({layer.name: layer.cache}, layer.group, layer.heads)
    ]


def check(rank: Rank, planes: Sequence[Plane]) -> tuple[Checked, ...]:
    """The check, which leaves every byte as it was, whatever it finds."""
    before = rank.memory.clone()
    try:
        return self_check(rank.layers, planes)
    finally:
        assert torch.equal(rank.memory, before)


def refused(rank: Rank, planes: Sequence[Plane]) -> LayoutMismatch:
    with pytest.raises(LayoutMismatch) as found:
        check(rank, planes)
    return found.value


def of(component: str, **changes: Any) -> Change:
    """Give the planes of a component other fields; numbers are added to those of ``base``."""

    def change(plane: Plane) -> Plane:
        if plane.component != component:
            return plane
        fields = {name: value(plane) if callable(value) else value for name, value in changes.items()}
        return replace(plane, **fields)

    return change


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton's kernels of vLLM on host memory, by Triton's interpreter. vLLM for CPUs leaves Triton out, so the module
    with the kernels is loaded once more, with Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.triton_utils, "triton", importlib.import_module("triton"))
        patch.setattr(vllm.triton_utils, "tl", importlib.import_module("triton.language"))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        kernels = loaded(str(triton_reshape_and_cache_flash.__file__))
        for name in ("triton_reshape_and_cache_flash", "triton_reshape_and_cache_flash_per_token_head_quant"):
            patch.setattr(triton_attn, name, getattr(kernels, name))
        yield


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Right planes pass.


@pytest.mark.parametrize(
    ("dtype", "width", "block"), [("float32", 32, 32), ("bfloat16", 64, 32), ("float16", 128, 64), ("bfloat16", 80, 32)]
)
def test_planes_of_the_cpu_kernel_pass(tmp_path: Path, dtype: str, width: int, block: int) -> None:
    config = config_of(tmp_path, dtype=dtype, block=block)
    rank = bound(config, attention(config, width=width))
    planes = declared(rank)
    [kind] = check(rank, planes)
    natural = {plane.component for plane in planes if plane.format == "plain"}
    assert (set(kind.layout.values), set(kind.layout.footprint)) == (natural, {"key", "value"} - natural)
    assert kind.backend == "CPU_ATTN"
    assert kind.layers == tuple(layer.name for layer in rank.layers)


@pytest.mark.parametrize(
    ("layout", "kernel_block"),
    [
        ("LBHNC", None),
        ("LBNHC", None),
        ("LHBNC", None),
        ("BLHNC", None),
        ("BLNHC", None),
        ("BHLNC", None),
        ("LBHNC", 8),
        ("LBNHC", 8),
    ],
)
def test_planes_of_tritons_kernel_pass_in_every_layout(
    interpreter: None, tmp_path: Path, layout: str, kernel_block: int | None
) -> None:
    config = config_of(tmp_path, block=16)
    modules = attention(config, count=2, heads=3, backend=triton_attn.TritonAttentionBackend)
    rank = bound(config, modules, layout=layout, kernel_block=kernel_block)
    [kind] = check(rank, packed(rank))
    assert kind.layout.values == ("key", "value")


def test_per_tensor_fp8_passes_by_its_footprint(tmp_path: Path) -> None:
    config = config_of(tmp_path, dtype="bfloat16", cache_dtype="fp8")
    try:
        modules = attention(config, width=64)
        rank = bound(config, modules)
    except NotImplementedError as error:
        # vLLM 0.31 and older on processors without AVX-512.
        pytest.skip(str(error))
    planes = [
        plane
        for layer in rank.layers
        for plane in formats.vllm_cpu({layer.name: layer.cache}, layer.group, modules[layer.name].isa, layer.heads)
    ]
    [kind] = check(rank, planes)
    assert (kind.layout.values, kind.layout.footprint, kind.unwritten) == ((), ("key", "value"), "")


@pytest.mark.parametrize("layout", ["LBNHC"])
def test_scales_of_each_token_and_head_pass_by_their_footprint(interpreter: None, tmp_path: Path, layout: str) -> None:
    rank, planes = with_scales(tmp_path, layout)
    [kind] = check(rank, planes)
    assert (kind.layout.values, kind.layout.footprint) == ((), ("key", "key_scale", "value", "value_scale"))


def with_scales(folder: Path, layout: str) -> tuple[Rank, list[Plane]]:
    """A cache of int8 whose scales stand behind each head's K and V of a token."""
    config = config_of(folder, cache_dtype="int8_per_token_head", block=8)
    modules = attention(config, count=1, heads=2, backend=triton_attn.TritonAttentionBackend)
    rank = bound(config, modules, layout=layout, specify=triton_attn.TritonAttentionBackend.customize_spec)
    [layer] = rank.layers
    # The backend sets all scales to one at its first use.
    modules[layer.name].impl._ensure_scale_caches(layer.cache)
    axes, parts = ("block", "head", "token", "content"), {"key": 32, "key_scale": 4, "value": 32, "value_scale": 4}
    return rank, list(planes_of_tensor(layer.cache, axes, layer.group, layer.name, parts, layer.heads))


@pytest.mark.parametrize("kernel_block", [None, 16])
def test_latent_planes_pass(tmp_path: Path, kernel_block: int | None) -> None:
    config = config_of(tmp_path, kv_lora_rank=512)
    rank = bound(config, latent(config), kernel_block=kernel_block)
    [kind] = check(rank, declared(rank))
    assert (kind.backend, kind.layout.values) == ("CPU_MLA", ("latent", "rope"))


def test_planes_of_a_recurrent_state_pass(tmp_path: Path) -> None:
    rank, planes = recurrent(tmp_path)
    [kind] = check(rank, planes)
    assert (kind.layout.values, kind.layout.footprint) == (("ssm",), ("conv_x", "conv_b", "conv_c"))


def recurrent(folder: Path) -> tuple[Rank, list[Plane]]:
    config = config_of(folder)
    modules = mamba(config)
    rank = bound(config, modules)
    held = {"conv_x": Interval(0, 64), "conv_b": Interval(64, 72), "conv_c": Interval(72, 80)}
    parts = [Part(name, channels=channels) for name, channels in held.items()]
    planes: list[Plane] = []
    for layer in rank.layers:
        conv, ssm = modules[layer.name].kv_cache
        planes += planes_of_tensor(conv, ("block", "row", "channel"), layer.group, layer.name, parts)
        planes += planes_of_tensor(ssm, ("block", "head", "content", "content"), layer.group, layer.name, ("ssm",))
    return rank, planes


def test_self_check_works_with_one_or_two_blocks(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    modules = attention(config, count=1)
    for blocks in (2, 3):
        rank = bound(config, modules, blocks=blocks)
        assert check(rank, declared(rank))[0].layout.values == ("value",)


def test_equal_layers_are_one_kind(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    modules = {**attention(config, count=4), **attention(config, first=4, count=2, heads=2, width=64)}
    rank = bound(config, modules)
    kinds = check(rank, declared(rank))
    assert [len(kind.layers) for kind in kinds] == [4, 2]


def test_self_check_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config))
    with caplog.at_level(logging.INFO, "kvferry"):
        report = check(rank, declared(rank))
    [line] = [record.getMessage() for record in caplog.records if "self-check" in record.getMessage()]
    blocks = ", ".join(map(str, report[0].layout.blocks))
    assert line.startswith(
        f"self-check: layers 4 of CPU_ATTN by values of value and footprint of key in blocks {blocks}; "
    )


@pytest.mark.parametrize("wrong", [1, 2, 5, 14, 15])
def test_kernel_that_is_wrong_in_one_block_is_found_if_the_block_is_drawn(tmp_path: Path, wrong: int) -> None:
    """The first, the last, and some that are drawn at each start."""
    config = config_of(tmp_path)
    modules = attention(config, count=1, heads=2)
    rank = bound(config, modules, blocks=16)
    [layer] = rank.layers
    update, tokens = modules[layer.name].impl.do_kv_cache_update, layer.spec.block_size

    def rotates_a_block(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        found = slots // tokens == wrong
        update(module, key, torch.where(found[:, None, None], value.roll(1, 0), value), cache, slots)

    modules[layer.name].impl.do_kv_cache_update = rotates_a_block
    found = []
    for seed in range(12):
        try:
            [kind] = self_check(rank.layers, declared(rank), seed)
        except LayoutMismatch as error:
            found.append(error.values["block"])
        else:
            assert wrong not in kind.layout.blocks
            assert {1, 15} < set(kind.layout.blocks)
            assert len(kind.layout.blocks) == 6
    assert set(found) == {str(wrong)}
    # In every start, or by chance.
    assert (len(found) == 12) == (wrong in (1, 15))


# Where vLLM writes its cache cannot be asked, strides and sizes are compared with the spec, and the report says so.


def test_a_backend_that_writes_inside_attention_is_checked_by_its_strides(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    modules = attention(config)
    rank = bound(config, modules)
    planes = declared(rank)
    for module in modules.values():
        module.impl = object()
    [kind] = check(rank, planes)
    assert (kind.layout.values, kind.layout.footprint) == ((), ())
    assert kind.unwritten == "its backend writes the cache inside attention"
    both = [replace(plane, base=plane.base + 4) if plane.component == "value" else plane for plane in planes]
    assert "declare the same bytes" in str(refused(rank, both))
    outside = [replace(plane, base=plane.base - 4) for plane in planes]
    assert "not its tensor's" in str(refused(rank, outside[2:] + planes[:2]))


def test_failed_write_leaves_the_check_of_strides_and_is_logged(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    modules = attention(config)
    rank = bound(config, modules)
    planes = declared(rank)
    for module in modules.values():
        module.isa = "no such instruction set"
    [kind] = check(rank, planes)
    assert kind.unwritten.startswith("vLLM's write failed: ")


def test_kind_is_unwritten_if_either_layer_cannot_be_written(tmp_path: Path) -> None:
    """The first and the last layer are written: whoever serves only what was written must hear of both."""
    config = config_of(tmp_path)
    modules = attention(config)
    rank = bound(config, modules)

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel")

    list(modules.values())[-1].impl.do_kv_cache_update = fails
    [kind] = check(rank, declared(rank))
    assert len(kind.layers) > 1
    assert "no kernel" in kind.unwritten


# Wrong planes are refused.


def swapped(one: str, other: str) -> Callable[[Plane], Plane]:
    names = {one: other, other: one}
    return lambda plane: replace(plane, component=names.get(plane.component, plane.component))


def transposed(plane: Plane) -> Plane:
    return replace(plane, unit_stride=plane.token_stride, token_stride=plane.unit_stride)


WRONG_PACKED: dict[str, Change] = {
    "K and V swapped": swapped("key", "value"),
    "heads and tokens swapped": transposed,
    "K from where V begins": of("key", base=lambda plane: plane.base + plane.state_bytes),
    "K one element late": of("key", base=lambda plane: plane.base + 4),
    "K, then V, instead of side by side": lambda plane: replace(
        plane,
        token_stride=plane.state_bytes,
        base=plane.base + (plane.page_tokens - 1) * plane.state_bytes * (plane.component == "value"),
    ),
    "a granule of the wrong stride": lambda plane: replace(
        plane, page_tokens=8, page_stride=plane.token_stride, token_stride=2 * plane.token_stride
    ),
    "blocks of another layer's distance": lambda plane: replace(plane, block_stride=2 * plane.block_stride),
    "K longer than V": lambda plane: replace(
        plane,
        state_bytes=plane.state_bytes + (32 if plane.component == "key" else -32),
        base=plane.base + 32 * (plane.component == "value"),
    ),
}


@pytest.mark.parametrize("name", WRONG_PACKED)
@pytest.mark.parametrize("whole", [True, False], ids=["all layers", "the last layer"])
def test_wrong_planes_of_tritons_kernel_are_refused(interpreter: None, tmp_path: Path, name: str, whole: bool) -> None:
    config = config_of(tmp_path, block=16)
    rank = bound(config, attention(config, count=2, heads=16, width=16, backend=triton_attn.TritonAttentionBackend))
    last = rank.layers[-1].name
    right = packed(rank)
    wrong = [WRONG_PACKED[name](plane) if whole or plane.layer == last else plane for plane in right]
    error = refused(rank, wrong)
    assert error.values["layer"] == (rank.layers[0].name if whole else last)
    assert error.values["layer"] in str(error)
    assert check(rank, right)[0].layout.values == ("key", "value")


def test_error_has_the_layer_the_cell_and_both_strings_of_bytes(interpreter: None, tmp_path: Path) -> None:
    config = config_of(tmp_path, block=16)
    modules = attention(config, count=1, heads=2, backend=triton_attn.TritonAttentionBackend)
    rank = bound(config, modules)
    written: dict[str, Any] = {}
    update = modules[rank.layers[0].name].impl.do_kv_cache_update

    def recorded(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if (slots >= 0).all():
            written.setdefault("key", key.clone())
            written.setdefault("value", value.clone())
        update(module, key, value, cache, slots)

    modules[rank.layers[0].name].impl.do_kv_cache_update = recorded
    error = refused(rank, [swapped("key", "value")(plane) for plane in packed(rank)])
    values = error.values
    assert (values["layer"], values["block"], values["token"], values["head"]) == (rank.layers[0].name, "1", "0", "0")
    component, other = values["component"], {"key": "value", "value": "key"}[values["component"]]
    for name, which in ((component, "expected"), (other, "found")):
        assert values[which] == written[name][0, 0].numpy().tobytes()[:16].hex()
        assert values[which] in str(error)


WRONG_CPU: dict[str, Change] = {
    "K and V swapped": swapped("key", "value"),
    "K by token": of("key", token_granule=1),
    "K by half a page": of("key", token_granule=16),
    "K in natural order": of("key", format="plain"),
    "V in K's place": of("value", base=lambda plane: plane.base - plane.page_tokens * plane.state_bytes),
    "K and V side by side": lambda plane: replace(
        plane,
        token_granule=1,
        token_stride=2 * plane.state_bytes,
        base=plane.base - (plane.page_tokens - 1) * plane.state_bytes * (plane.component == "value"),
    ),
    "V one token late": of("value", base=lambda plane: plane.base + plane.state_bytes),
    "pages of tokens first": lambda plane: replace(
        plane, token_granule=1, token_stride=4 * plane.state_bytes, unit_stride=plane.state_bytes
    ),
}


def test_elements_of_another_type_than_the_tensors_are_refused(tmp_path: Path) -> None:
    """Engines compare the names: by a wrong one, they would read elements of another type as their own."""
    config = config_of(tmp_path)
    rank = bound(config, attention(config, count=2))
    planes = declared(rank)
    for dtype in ("bfloat16", "int32", ""):
        values = refused(rank, [*planes[:-1], replace(planes[-1], dtype=dtype)]).values
        assert (values["expected"], values["found"]) == ("float32", dtype)
        assert values["layer"] == rank.layers[-1].name
    recurrent_rank, states = recurrent(tmp_path)
    wrong = [replace(plane, dtype="float16") if plane.component == "ssm" else plane for plane in states]
    assert refused(recurrent_rank, wrong).values["component"] == "ssm"


@pytest.mark.parametrize("name", WRONG_CPU)
def test_wrong_planes_of_the_cpu_kernel_are_refused(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config))
    error = refused(rank, [WRONG_CPU[name](plane) for plane in declared(rank)])
    assert error.values["layer"] == rank.layers[0].name


def test_keys_declared_by_token_are_refused_with_the_changed_bytes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config))
    values = refused(rank, [WRONG_CPU["K by token"](plane) for plane in declared(rank)]).values
    # The bytes before vLLM wrote another token, and the bytes afterwards.
    assert (values["component"], values["expected"][:8]) == ("key", "a5a5a5a5")
    assert values["found"] != values["expected"]
    assert len(values["found"]) == len(values["expected"])


WRONG_LATENT: dict[str, Change] = {
    "another split": lambda plane: replace(
        plane,
        state_bytes=plane.state_bytes + (-256 if plane.component == "latent" else 256),
        base=plane.base - 256 * (plane.component == "rope"),
    ),
    "latent and rope swapped": lambda plane: replace(
        plane, base=plane.base + (256 if plane.component == "latent" else -2048)
    ),
    "one element late": lambda plane: replace(plane, base=plane.base + 4),
}


@pytest.mark.parametrize("name", WRONG_LATENT)
def test_wrong_latent_planes_are_refused(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, block=16, kv_lora_rank=512)
    rank = bound(config, latent(config))
    assert refused(rank, [WRONG_LATENT[name](plane) for plane in declared(rank)]).values["layer"] == rank.layers[0].name


WRONG_SCALES: dict[str, Change] = {
    "the scales swapped": swapped("key_scale", "value_scale"),
    "K and V swapped": swapped("key", "value"),
    "K's scale behind V": lambda plane: replace(
        plane, base=plane.base + {"key_scale": 32, "value": -4}.get(plane.component, 0)
    ),
}


@pytest.mark.parametrize("name", WRONG_SCALES)
def test_wrong_planes_of_scales_are_refused(interpreter: None, tmp_path: Path, name: str) -> None:
    rank, planes = with_scales(tmp_path, "LBHNC")
    refused(rank, [WRONG_SCALES[name](plane) for plane in planes])


WRONG_STATE: dict[str, Change] = {
    "heads half a head late": of("ssm", base=lambda plane: plane.base + plane.state_bytes // 2),
    "channels first": lambda plane: (
        plane
        if plane.component == "ssm"
        else replace(
            plane,
            unit_stride=3 * plane.state_bytes,
            token_stride=plane.state_bytes,
            base=plane.base + {"conv_x": 0, "conv_b": 2 * 64 * 2, "conv_c": 2 * 72 * 2}[plane.component],
        )
    ),
    "the convolution one element late": lambda plane: (
        plane if plane.component == "ssm" else replace(plane, base=plane.base + 2)
    ),
}


@pytest.mark.parametrize("name", WRONG_STATE)
def test_wrong_planes_of_a_recurrent_state_are_refused(tmp_path: Path, name: str) -> None:
    rank, planes = recurrent(tmp_path)
    refused(rank, [WRONG_STATE[name](plane) for plane in planes])


def test_planes_that_are_missing_or_of_no_layer_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config))
    planes = declared(rank)
    assert "of a block, which holds" in str(refused(rank, planes[1:]))
    assert "no planes" in str(refused(rank, planes[2:]))
    assert "no such layer" in str(refused(rank, [*planes, replace(planes[0], layer="layers.9")]))


def test_planes_outside_the_caches_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config))
    far = [replace(plane, base=plane.base + rank.memory.numel()) for plane in declared(rank)]
    assert "not its tensor's" in str(refused(rank, far))


def test_layers_in_the_same_memory_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rank = bound(config, attention(config, count=2))
    first, second = rank.layers
    both = [first, replace(second, cache=first.cache)]
    planes = [plane for layer in both for plane in layer_planes(layer)]
    # After a failed self-check, the rank does not register its caches.
    spec = EngineSpec("prefill", (first.group,))
    caches: Any = {layer.name: layer.cache for layer in both}
    with Fabric() as fabric:
        port = WorkerPort(fabric.client(), spec, 0)
        with pytest.raises(BadGeometry, match="hold the same byte"):
            port.register_memory(caches, planes=planes, replicated=True)


def test_a_cache_that_vllm_does_not_write_to_is_refused(tmp_path: Path) -> None:
    """vLLM handed over other tensors than those of its layers."""
    config = config_of(tmp_path)
    modules = attention(config, count=1)
    rank = bound(config, modules)
    planes = declared(rank)
    module = modules[rank.layers[0].name]
    module.kv_cache = module.kv_cache.clone()
    assert refused(rank, planes).values["found"] == "a5" * 16


# Random declarations, against what vLLM's kernel does byte by byte.


def test_random_declarations_pass_only_if_they_are_right(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    modules = attention(config, count=1, heads=2, width=32)
    rank = bound(config, modules, blocks=3)
    [layer] = rank.layers
    meaning = meanings(modules[layer.name], layer)
    random = np.random.default_rng(1)
    seen = {True: 0, False: 0}
    for _ in range(100):
        planes = declared(rank)
        for _ in range(random.integers(1, 3)):
            planes = changed(planes, random)
        right = is_right(planes, meaning, layer)
        seen[right] += 1
        assert passes(rank, planes) is right, planes
    # Both kinds were drawn often.
    assert min(seen.values()) > 10, seen


def passes(rank: Rank, planes: Sequence[Plane]) -> bool:
    try:
        check(rank, planes)
    except LayoutMismatch:
        return False
    return True


def meanings(module: Any, layer: Layer) -> tuple[int, Meaning]:
    """Where the cache begins, and for every byte of it, found by writing one token of one head at a time: block, token,
    head, component, number of the byte."""
    cache: Any = layer.cache
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    kept = raw.clone()
    blocks, heads, tokens, width = cache.shape
    found = np.full((len(raw), 5), -1)
    random = torch.Generator().manual_seed(3)
    base = [torch.randn(1, heads, width // 2, generator=random) for _ in range(2)]
    for slot in range(blocks * tokens):
        for component, head in product(range(2), range(heads)):
            module.impl.do_kv_cache_update(module, *base, cache, torch.tensor([slot]))
            before = raw.clone()
            other = [each.clone() for each in base]
            # All bits differ, so every byte that this is written to changes.
            bits = other[component].view(torch.int32)
            bits[:, head] = ~bits[:, head]
            module.impl.do_kv_cache_update(module, *other, cache, torch.tensor([slot]))
            written = (raw != before).nonzero().flatten().numpy()
            found[written, :4] = (slot // tokens, slot % tokens, head, component)
            # V's bytes rise as V does; K is column-major, as `test_cache_kernel` shows.
            found[written, 4] = np.arange(len(written))
    raw.copy_(kept)
    return cache.untyped_storage().data_ptr(), found


def is_right(planes: Sequence[Plane], meaning: tuple[int, Meaning], layer: Layer) -> bool:
    """Whether every granule of every head holds exactly what the engine writes for it."""
    begin, known = meaning
    held = 0
    for plane in planes:
        block, page, unit, at, number = np.ogrid[
            : layer.group.num_blocks, : plane.pages, : len(plane.units), : plane.page_tokens, : plane.state_bytes
        ]
        where = plane.base - begin + block * plane.block_stride + page * plane.page_stride
        where = where + unit * plane.unit_stride + at * plane.token_stride + number
        if where.min() < 0 or where.max() >= len(known):
            return False
        token, component = page * plane.page_tokens + at, ("key", "value").index(plane.component)
        found = np.moveaxis(known[where], -1, 0)
        right = (found[0] == block) & (found[2] == unit) & (found[3] == component)
        right &= found[1] // plane.token_granule == token // plane.token_granule
        if plane.format == "plain":
            right &= (found[1] == token) & (found[4] == number) & (component == 1)
        held += where.size
        if not right.all() or len(np.unique(where)) != where.size:
            return False
    return held == len(known)


def changed(planes: list[Plane], random: np.random.Generator) -> list[Plane]:
    """One or two fields of one or all planes changed; unchanged where that would be no plane."""
    sizes = [4, 128, 512, 4096, 8192, 16384, -4, -128, -4096, -8192]
    which, by = int(random.integers(0, 3)), int(random.choice(sizes))
    kind = str(
        random.choice(["base", "strides", "granule", "format", "swap", "pages", "token", "unit", "block", "size"])
    )
    found = []
    for number, plane in enumerate(planes):
        if kind == "swap":
            plane = swapped("key", "value")(plane)
        elif which in (number, 2):
            plane = one_changed(plane, kind, by, random)
        found.append(plane)
    return found


def one_changed(plane: Plane, kind: str, by: int, random: np.random.Generator) -> Plane:
    try:
        if kind == "base":
            return replace(plane, base=plane.base + by)
        if kind == "strides":
            return transposed(plane)
        if kind == "granule":
            return replace(plane, token_granule=int(random.choice([1, 2, 8, 16, 32])))
        if kind == "format":
            return replace(plane, format=str(random.choice(["plain", "vllm-cpu-column-major"])))
        if kind == "pages":
            half = plane.page_tokens // 2
            return replace(
                plane,
                page_tokens=half,
                page_stride=half * plane.token_stride,
                token_granule=min(half, plane.token_granule),
            )
        if kind == "size":
            return replace(plane, state_bytes=plane.state_bytes + by)
        name = f"{kind}_stride"
        return replace(plane, **{name: getattr(plane, name) + by})
    except BadGeometry:
        return plane


# In a real vLLM.


@pytest.mark.timeout(600)
def test_vllm_does_not_start_with_wrong_planes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=4)
    settings = {"kv_connector": "WrongConnector", "kv_connector_module_path": "tests.support.wrong_connector"}
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        wrong = {**kvferry("kv_producer", home.address), **settings}
        with closing(Node(model, tmp_path / "on.log", connector=wrong)) as engine, pytest.raises(EOFError):
            engine.ready()
        log = (tmp_path / "on.log").read_text()
        assert "LayoutMismatch: layer model.layers.0.self_attn.attn: " in log


@pytest.mark.timeout(600)
def test_vllm_starts_with_its_planes_and_logs_their_check(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=4)
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        connector = kvferry("kv_producer", home.address)
        with closing(Node(model, tmp_path / "log", connector=connector)) as engine:
            engine.ready()
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if "self-check: " in line]
    assert len(lines) == 1
    # As vLLM's own lines.
    how = "layers 4 of CPU_ATTN by values of value and footprint of key in blocks 1, "
    assert re.search(rf"INFO \d\d-\d\d \d\d:\d\d:\d\d .*self-check: {how}", lines[0])
