"""What a tensor holds of the model: heads, tokens, components."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvferry._arguments import check_fields, instance, integer
from kvferry.errors import InvalidField
from kvferry.geometry.plane import Interval, TokenShard

PLAIN = "plain"
"""Format of bytes in their natural order: each unit's content of each state is contiguous and means the same in every
layout, so that engines of different layouts can read from each other."""

OPAQUE = "opaque"
"""Format of bytes whose order inside a page is not declared."""

ALL_TOKENS = TokenShard()


@dataclass(frozen=True, slots=True)
class Part:
    """One component inside a tensor.

    Attributes:
        component: its name, see `Plane.component`.
        kv: its index along the ``kv`` axis.
        content: its elements of the ``content`` axes; None: all.
        channels: its indices along the tensor's ``unit`` axis; None: all.
        units: the units these are, counted over the whole model; None: those of the call.
        axis_size: units of the whole model; None: that of the call.
        format, token_granule: None: those of the call.
    """

    component: str
    kv: int | None = None
    content: Interval | None = None
    channels: Interval | None = None
    units: Interval | None = None
    axis_size: int | None = None
    format: str | None = None
    token_granule: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Holding:
    """What the tensors of a call hold, the same for all of them.

    Attributes:
        units: units held, counted over the whole model; None: as many as the tensor has, and no other rank has any.
        axis_size: units of the whole model; None: the end of `units`.
        token_shard: tokens held.
        tokens_per_state: tokens that one state stands for.
        format: what the bytes mean.
        dtype: None: the tensor's.
        token_granule: states that may not be cut apart; 0: a whole page.
        units_divide: whether single units may be read.
        optional_cover: may stay uncovered by a source.
        shared: other tensors of the rank that say so too may be the same memory: layers that share a cache.
    """

    units: Interval | None = None
    axis_size: int | None = None
    token_shard: TokenShard = ALL_TOKENS
    tokens_per_state: Fraction = Fraction(1)
    format: str = PLAIN
    dtype: str | None = None
    token_granule: int = 1
    units_divide: bool = True
    optional_cover: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.tokens_per_state, Fraction):
            object.__setattr__(self, "tokens_per_state", Fraction(integer("tokens_per_state", self.tokens_per_state)))
        if self.tokens_per_state <= 0 or self.token_granule < 0:
            raise InvalidField("holding", (self.tokens_per_state, self.token_granule), "positive tokens_per_state")


def heads_held(heads: range | Interval, total_heads: int | None) -> Holding:
    """Holding of some heads of the model; raises `InvalidField`.

    Args:
        heads: the heads, e.g. ``range(2, 4)``.
        total_heads: heads of the whole model.
    """
    expected = "range(first, end) of the model's heads, not empty"
    if isinstance(heads, range):
        if heads.step != 1 or not 0 <= heads.start < heads.stop:
            raise InvalidField("heads", heads, expected)
        heads = Interval(heads.start, heads.stop)
    found = instance("heads", heads, Interval, expected)
    if total_heads is None:
        raise InvalidField("total_heads", None, "the number of heads of the whole model, beside heads")
    return Holding(units=found, axis_size=integer("total_heads", total_heads, found.end))
