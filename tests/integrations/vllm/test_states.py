"""Recurrent states between engines of different tensor-parallel sizes and orders of the convolution's inputs.

The oracle is vLLM's: its shape calculators give the states of a rank, its `MambaBase.bind_kv_cache` cuts them out of
its own allocation, and its weight loaders tell which channels of the model a rank's convolution has. Every state has a
value of its own in the model; the source's and the destination's ranks are filled with them, and what the plan moves
must make the destination's caches, bytes of padding and of other blocks included, what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _make_fused_conv1d_weight_loader
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import Blocks, plan_read
from kvferry.errors import Incompatible, InvalidField
from kvferry.integrations.vllm.shards import RankPlace
from kvferry.planner import Path
from tests.support.vllm_caches import CachedEngine, configuration, engine, move, places

Shapes = Callable[[int], tuple[tuple[int, ...], ...]]
LAYERS = ("model.layers.0.mixer", "model.layers.2.mixer")
NUM_BLOCKS, SOURCE_BLOCK, BLOCK = 7, 3, 5
KERNEL = 4


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    Attributes:
        type: what vLLM calls it.
        shapes: shapes of its states, by tensor-parallel size.
        dtypes: their types.
        channels: which channels of the model a rank's convolution has, in order, by (ranks, rank).
        groups: groups of Mamba-2, which stand in the model's configuration.
    """

    type: MambaAttentionBackendEnum
    shapes: Shapes
    dtypes: tuple[torch.dtype, ...]
    channels: Callable[[int, int], list[int]] | None = None
    groups: int = 0


def by_shares(size: int) -> Callable[[int, int], list[int]]:
    """A convolution of one projection, of which a rank has its share."""
    return lambda ranks, rank: list(range(rank * size // ranks, (rank + 1) * size // ranks))


def mamba2(groups: int, heads: int, dim: int, state: int) -> Kind:
    def channels(ranks: int, rank: int) -> list[int]:
        # As in `MambaMixer2.__init__`.
        extra = MambaStateShapeCalculator.extra_groups_for_head_shards(groups, ranks)
        grouped = ((groups + extra) * state, extra * state, groups == 1)
        settings: Any = [(heads * dim, 0, False), grouped, grouped]
        local = (heads * dim + 2 * (groups + extra) * state) // ranks
        return loaded(mamba_v2_sharded_weight_loader(settings, ranks, rank), local, heads * dim + 2 * groups * state)

    def shapes(ranks: int) -> Any:
        return MambaStateShapeCalculator.mamba2_state_shape(ranks, heads * dim, groups, heads, dim, state, KERNEL)

    kind = MambaAttentionBackendEnum.MAMBA2
    return Kind(kind, shapes, (torch.bfloat16, torch.float32), channels, groups)


def loaded(loader: Any, local: int, size: int) -> list[int]:
    """Where a loader takes a rank's rows from."""
    parameter = SimpleNamespace(data=torch.full((local, 1), -1))
    loader(parameter, torch.arange(size)[:, None])
    return [int(row) for row in parameter.data[:, 0]]


def delta_net(key_heads: int, value_heads: int, dim: int) -> Kind:
    keys, values = key_heads * dim, value_heads * dim

    def channels(ranks: int, rank: int) -> list[int]:
        # As in `QwenGatedDeltaNetAttention.__init__`.
        settings: Any = [(keys, 0, False), (keys, 0, False), (values, 0, False)]
        local = (2 * keys + values) // ranks
        return loaded(mamba_v2_sharded_weight_loader(settings, ranks, rank), local, 2 * keys + values)

    def shapes(ranks: int) -> Any:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(ranks, key_heads, value_heads, dim, dim, KERNEL)

    kind = MambaAttentionBackendEnum.GDN_ATTN
    return Kind(kind, shapes, (torch.bfloat16, torch.float32), channels)


def kimi(heads: int, dim: int) -> Kind:
    def channels(ranks: int, rank: int) -> list[int]:
        found = torch.full((3 * heads * dim // ranks, 1, 1), -1)
        loader = _make_fused_conv1d_weight_loader([heads * dim] * 3, ranks, rank)
        for shard in range(3):
            rows = torch.arange(shard * heads * dim, (shard + 1) * heads * dim)
            loader(SimpleNamespace(data=found), rows[:, None], shard)
        return [int(row) for row in found.flatten()]

    def shapes(ranks: int) -> Any:
        return MambaStateShapeCalculator.kda_state_shape(ranks, heads, dim, conv_kernel_size=KERNEL)

    return Kind(MambaAttentionBackendEnum.GDN_ATTN, shapes, (torch.bfloat16, torch.float32), channels)


KINDS = {
    "Mamba-1": Kind(
        MambaAttentionBackendEnum.MAMBA1,
        lambda ranks: MambaStateShapeCalculator.mamba1_state_shape(ranks, 48, 8, KERNEL),
        (torch.bfloat16, torch.float32),
        by_shares(48),
    ),
    "Mamba-2": mamba2(groups=6, heads=12, dim=4, state=8),
    "Mamba-2 of one group": mamba2(groups=1, heads=12, dim=4, state=8),
    "gated delta net": delta_net(key_heads=6, value_heads=12, dim=4),
    "Kimi's delta net": kimi(heads=6, dim=8),
    "short convolution": Kind(
        MambaAttentionBackendEnum.SHORT_CONV,
        lambda ranks: MambaStateShapeCalculator.short_conv_state_shape(ranks, 48, KERNEL),
        (torch.bfloat16,),
        by_shares(48),
    ),
    "linear attention": Kind(
        MambaAttentionBackendEnum.LINEAR,
        lambda ranks: MambaStateShapeCalculator.linear_attention_state_shape(12, ranks, 4),
        (torch.float32,),
    ),
}


@pytest.fixture
def conv_order(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the order of the convolution's inputs: ``SD`` or ``DS``. The environment does it elsewhere, and vLLM's
    configuration of some CPUs changes it there."""
    return lambda order: monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: order)


def hybrid(name: str, kind: Kind, ranks: int, layout: KVCacheLayout, **changes: Any) -> CachedEngine:
    """An engine with layers of a kind of state, whose pages are padded as beside layers of attention."""
    config = configuration(layout=layout, tensor_parallel_size=ranks)
    described = transformers.Mamba2Config(n_groups=kind.groups) if kind.groups else transformers.PretrainedConfig()
    config.model_config = SimpleNamespace(hf_text_config=described, original_max_model_len=2048, max_model_len=2048)

    def specs(place: RankPlace) -> dict[str, MambaSpec]:
        shapes = kind.shapes(ranks)
        fields = {"block_size": 2048, "shapes": shapes, "dtypes": kind.dtypes, "mamba_type": kind.type, **changes}
        page = MambaSpec(**fields).page_size_bytes
        return dict.fromkeys(LAYERS, MambaSpec(**fields, page_size_padded=page + 64))

    return engine(name, specs, config, list(places(tp=ranks)), num_blocks=NUM_BLOCKS)


def values(layer: int, state: int, channel: torch.Tensor, inner: int) -> torch.Tensor:
    """Of a state of the model: one value for each head or channel, and place in it; whole numbers that bfloat16 has."""
    return (layer * 61 + state * 37 + channel[:, None] * 7 + torch.arange(inner)[None, :] * 3) % 251 + 1


def write(of: CachedEngine, kind: Kind, block: int, order: str) -> None:
    """Write a request's states into a block of every rank, as vLLM's layers see them."""
    ranks = len(of.places)
    for place, caches in zip(of.places, of.caches, strict=True):
        for index, name in enumerate(LAYERS):
            bound = SimpleNamespace(get_state_shape=lambda: kind.shapes(ranks), get_state_dtype=lambda: kind.dtypes)
            MambaBase.bind_kv_cache(bound, caches[name])
            for number, state in enumerate(bound.kv_cache):
                if number == 0 and kind.channels is not None:
                    channels = torch.tensor(kind.channels(ranks, place.tp))
                    rows = values(index, number, channels, KERNEL - 1)
                    state[block] = (rows if order == "DS" else rows.T).to(state.dtype)
                else:
                    heads = state.shape[1]
                    own = torch.arange(place.tp * heads, (place.tp + 1) * heads)
                    flat = values(index, number, own, state[block, 0].numel())
                    state[block] = flat.view(state[block].shape).to(state.dtype)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "ranks", [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (1, 6), (6, 1)], ids=lambda of: f"{of[0]}-{of[1]}"
)
@pytest.mark.parametrize("orders", [("SD", "SD"), ("DS", "DS"), ("SD", "DS")], ids="-".join)
def test_states_move_as_vllm_divides_them(
    kind: Kind, ranks: tuple[int, int], orders: tuple[str, str], conv_order: Callable[[str], None]
) -> None:
    conv_order(orders[0])
    source = hybrid("p", kind, ranks[0], KVCacheLayout.LBHNC)
    write(source, kind, SOURCE_BLOCK, orders[0])
    conv_order(orders[1])
    destination = hybrid("d", kind, ranks[1], KVCacheLayout.BLHNC)
    for path in Path:
        destination.poison()
        write(destination, kind, BLOCK, orders[1])
        wanted = destination.poison()
        [group] = source.geometry.groups
        theirs, mine = Blocks([SOURCE_BLOCK], state_token=99), Blocks([BLOCK], state_token=99)
        move(source.geometry, destination.geometry, {group.name: theirs}, {group.name: mine}, (0, 99), path)
        for got, want in zip(destination.caches, wanted, strict=True):
            for name in LAYERS:
                assert torch.equal(got[name], want[name]), name


def test_convolutions_of_different_lengths_are_refused() -> None:
    """A draft makes them longer, so that drafts can be taken back."""
    short = KINDS["short convolution"]
    longer = Kind(
        short.type,
        lambda ranks: MambaStateShapeCalculator.short_conv_state_shape(ranks, 48, KERNEL, num_spec=2),
        short.dtypes,
    )
    source, destination = (hybrid(n, k, 1, KVCacheLayout.LBHNC) for n, k in (("p", short), ("d", longer)))
    with pytest.raises(Incompatible, match=r"block_states is 3 at the source .*, 5 at the destination"):
        plan_read(source.geometry, destination.geometry, 0)


def test_replicated_state_is_not_divided() -> None:
    kind = KINDS["short convolution"]
    source = hybrid(
        "p", Kind(kind.type, lambda _: kind.shapes(1), kind.dtypes), 2, KVCacheLayout.LBHNC, tp_replicated=True
    )
    assert {str(plane.units) for _, plane in source.geometry.planes()} == {"[0, 48)"}


def test_ambiguous_groups_of_mamba2_are_refused() -> None:
    """One group on each of two ranks is the model's only one, or one of two: the configuration decides."""
    kind = KINDS["Mamba-2 of one group"]
    unknown = Kind(kind.type, kind.shapes, kind.dtypes, kind.channels)
    with pytest.raises(InvalidField, match="mamba_n_groups"):
        hybrid("p", unknown, 2, KVCacheLayout.LBHNC)


def test_states_with_buffers_of_drafts_are_refused() -> None:
    kind = KINDS["Mamba-2"]
    ring = Kind(kind.type, lambda ranks: (*kind.shapes(ranks), (12, 8, 4)), (*kind.dtypes, torch.bfloat16), groups=6)
    with pytest.raises(InvalidField, match="without buffers of drafts"):
        hybrid("p", ring, 1, KVCacheLayout.LBHNC)
