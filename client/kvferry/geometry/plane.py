"""A plane: the addresses of one KV tensor's bytes, the part of the model's state that they hold, and how it may be cut.

A plane is one logical KV tensor of one layer on one rank. The address of the contiguous ``state_bytes`` bytes of unit
``u`` (a KV head or state channel, counted over the whole model) and state ``x`` of block ``id`` is ::

    base + id * block_stride + (x // page_tokens) * page_stride + (u - units.begin) * unit_stride
         + (x % page_tokens) * token_stride

A state is the stored value of one token, or of ``tokens_per_state`` tokens together.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from fractions import Fraction
from operator import attrgetter

from kvferry._arguments import check_fields, integer, showable, text
from kvferry.errors import BadGeometry

ADDRESS_LIMIT = 1 << 63
"""Addresses stay below this, so that sums of them fit numpy's int64 and NIXL's checks cannot wrap."""


class MemoryKind(enum.IntEnum):
    """Address space of a plane, numbered as in the proto."""

    DRAM = 1
    VRAM = 2


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open interval ``[begin, end)``, not empty."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.begin < self.end:
            raise BadGeometry("interval", f"[{self.begin}, {self.end}) is empty or negative")

    def __len__(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"[{self.begin}, {self.end})"

    def intersect(self, other: Interval) -> Interval | None:
        """The common part; None if there is none."""
        begin, end = max(self.begin, other.begin), min(self.end, other.end)
        return Interval(begin, end) if begin < end else None


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens held: token t when ``t // interleave % count == index``. The default holds all.

    As ranks hold them in vLLM's decode context parallelism (``cp_kv_cache_interleave_size``, vllm/config/parallel.py;
    `vllm/v1/worker/block_table.py` maps positions to ranks the same way).
    """

    index: int = 0
    count: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 <= self.index < self.count and self.interleave >= 1):
            raise BadGeometry("token shard", f"index {self.index} of {self.count}, interleave {self.interleave}")
        if self.count == 1:
            # All tokens, whatever the interleave, so that equal shards compare equal.
            object.__setattr__(self, "interleave", 1)

    def __str__(self) -> str:
        return "all tokens" if self.count == 1 else f"tokens {self.index} of {self.count} by {self.interleave}"


def shard(index: int, count: int, size: int) -> Interval:
    """The units of part `index` of `count` of an axis of `size` units: ``[x·H//n, (x+1)·H//n)``, or one unit when that
    is empty: the rule of most engines. The planner never applies it, since ranks declare their parts.

    With fewer units than parts, neighbours hold the same unit: replicas. Where `size` divides `count`, part r holds
    unit ``r // (count // size)``, as vLLM gives KV heads to tensor-parallel ranks (``QKVParallelLinear``: the
    weight's shard is ``tp_rank // num_kv_head_replicas``, vllm/model_executor/layers/linear.py, and
    ``ModelConfig.get_num_kv_heads``: ``max(1, total // tp_size)``, vllm/config/model.py). Other sizes, which vLLM
    refuses, follow the same rule.

    Raises:
        BadGeometry: there is no such part, or the axis has no units.
    """
    index, count, size = integer("index", index), integer("count", count), integer("size", size)
    if not (0 <= index < count and size >= 1):
        raise BadGeometry("shard", f"part {index} of {count} of an axis of {size}")
    begin, end = index * size // count, (index + 1) * size // count
    return Interval(begin, max(end, begin + 1))


def shards(count: int, size: int) -> tuple[Interval, ...]:
    """`shard` of every part: heads over tensor-parallel ranks, or layers over pipeline stages."""
    return tuple(shard(index, count, size) for index in range(integer("count", count, 1)))


@dataclass(frozen=True, slots=True)
class Plane:
    """One logical KV tensor of one layer on one rank. The address formula is in the module's docstring.

    Attributes:
        layer, component: the plane's name; equal on both engines of a read.
        group: name of the plane's group.
        format: names the meaning of the bytes, compared verbatim.
        dtype: element type, compared verbatim; may be empty.
        memory_kind, device: address space, as NIXL counts devices.
        base: address of the first unit and state of block 0.
        num_blocks: blocks of the plane, at least as many as its group has.
        block_stride, page_stride, unit_stride, token_stride: bytes; 0 where there is only one block, page, unit or
            token.
        page_tokens: states per page; divides block_states.
        block_states: states this rank holds per block.
        state_bytes: contiguous bytes of one unit of one state.
        axis_size: units of the whole model's plane.
        units: the units held.
        token_shard: the tokens held.
        tokens_per_state: tokens that one state stands for.
        token_granule: smallest number of consecutive states that may be cut off; divides page_tokens.
        units_divide: whether single units may be read; else all held units or none.
        optional_cover: whether the plane may stay uncovered by a source.
        shared: whether other shared planes of the rank may hold the same bytes, as of layers that share a cache. Other
            planes that hold the same byte are refused. A read never writes into two planes that hold the same byte.
    """

    layer: str
    component: str
    group: str
    format: str
    dtype: str
    memory_kind: MemoryKind
    device: int
    base: int
    num_blocks: int
    block_stride: int
    page_tokens: int
    page_stride: int
    block_states: int
    unit_stride: int
    token_stride: int
    state_bytes: int
    axis_size: int
    units: Interval
    token_shard: TokenShard = TokenShard()
    tokens_per_state: Fraction = Fraction(1)
    token_granule: int = 1
    units_divide: bool = True
    optional_cover: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        problem = self._problem()
        if problem:
            raise BadGeometry(f"plane {self.name}", problem)

    def moved(self, layer: str, base: int) -> Plane:
        """The same plane for another layer, at another address.

        Raises the errors of the constructor. Only layer and base are checked: the planes of a model differ in nothing
        else, and an engine of a hundred ranks has tens of thousands of planes.
        """
        found = object.__new__(Plane)
        for assign, value in zip(_ASSIGN, _values(self), strict=True):
            assign(found, value)
        object.__setattr__(found, "layer", text("layer", layer))
        object.__setattr__(found, "base", integer("base", base))
        problem = found._place_problem()
        if problem:
            raise BadGeometry(f"plane {found.name}", problem)
        return found

    @property
    def name(self) -> str:
        """``layer/component``, unique on a rank."""
        return f"{self.layer}/{self.component}"

    @property
    def pages(self) -> int:
        """Pages per block."""
        return self.block_states // self.page_tokens

    def unit_address(self, unit: int) -> int:
        """The address of the unit's first state in block 0."""
        return self.base + (unit - self.units.begin) * self.unit_stride

    @property
    def block_extent(self) -> int:
        """Bytes from the first to one past the last byte of a block, holes included."""
        return (
            (self.pages - 1) * self.page_stride
            + (len(self.units) - 1) * self.unit_stride
            + (self.page_tokens - 1) * self.token_stride
            + self.state_bytes
        )

    @property
    def extent(self) -> tuple[int, int]:
        """First address, and one past the last address, of the plane, holes included."""
        return self.base, self.base + (self.num_blocks - 1) * self.block_stride + self.block_extent

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block holds, without holes."""
        return self.block_states * len(self.units) * self.state_bytes

    @property
    def axes(self) -> list[tuple[int, int, str]]:
        """(Stride, count, name of the stride) of every axis of more than one element, the longest stride first."""
        axes = (
            (self.token_stride, self.page_tokens, "token_stride"),
            (self.unit_stride, len(self.units), "unit_stride"),
            (self.page_stride, self.pages, "page_stride"),
            (self.block_stride, self.num_blocks, "block_stride"),
        )
        return sorted([axis for axis in axes if axis[1] > 1], reverse=True)

    @property
    def apart(self) -> list[tuple[int, int]]:
        """(Stride, count) of every axis that steps further than from block to block: along these, a block is in several
        places."""
        if self.num_blocks == 1:
            return []
        return [(step, count) for step, count, _ in self.axes if step > self.block_stride]

    def _problem(self) -> str:
        if not 1 <= len(self.component.encode()) <= 64:
            return "component has 1 to 64 bytes"
        for attribute in ("component", "group", "format", "dtype"):
            if not showable(getattr(self, attribute)):
                return f"{attribute} {getattr(self, attribute)!a} has control characters"
        if not self.format:
            return "format is empty"
        for attribute in ("num_blocks", "page_tokens", "block_states", "state_bytes", "axis_size", "token_granule"):
            if getattr(self, attribute) < 1:
                return f"{attribute} is {getattr(self, attribute)}, not at least 1"
        # This includes strides of axes of one element: every declared number fits numpy's int64, and the length of an
        # interval fits the result of `len`.
        for attribute in ("axis_size", "device", "block_stride", "page_stride", "unit_stride", "token_stride"):
            if not 0 <= getattr(self, attribute) < ADDRESS_LIMIT:
                return f"{attribute} is {getattr(self, attribute)}, not in 0 ... 2**63 - 1"
        if self.num_blocks >= 1 << 31:
            return f"num_blocks is {self.num_blocks}, not below 2**31"
        if self.units.end > self.axis_size:
            return f"units {self.units} reach past the axis of {self.axis_size}"
        if self.block_states % self.page_tokens:
            return f"block_states {self.block_states} is not a multiple of page_tokens {self.page_tokens}"
        if self.page_tokens % self.token_granule:
            return f"token_granule {self.token_granule} does not divide page_tokens {self.page_tokens}"
        if self.tokens_per_state <= 0:
            return f"tokens_per_state is {self.tokens_per_state}"
        if self.token_shard.count > 1 and self.token_shard.interleave % self.tokens_per_state:
            return f"a state of {self.tokens_per_state} tokens is torn apart by {self.token_shard}"
        return self._place_problem() or self._overlap() or self._scattered_cell()

    def _place_problem(self) -> str:
        """The problem of the plane's layer or address; else empty."""
        if not 1 <= len(self.layer.encode()) <= 256:
            return "layer has 1 to 256 bytes"
        if not showable(self.layer):
            return f"layer {self.layer!a} has control characters"
        if not 0 <= self.base < ADDRESS_LIMIT:
            return f"base is {self.base}, not in 0 ... 2**63 - 1"
        if self.extent[1] >= ADDRESS_LIMIT:
            return f"its last address {self.extent[1]:#x} is not below 2**63"
        return ""

    def _overlap(self) -> str:
        """The problem if two different (block, page, unit, state) share a byte; else empty.

        Sorted by stride, each axis must step over everything that the axes of smaller strides span. That is sufficient,
        and true of every layout that is a permuted, padded array.
        """
        span = self.state_bytes
        for stride, count, label in reversed(self.axes):
            if stride < span:
                return f"{label} {stride} is smaller than the {span} bytes it has to step over"
            span += stride * (count - 1)
        return ""

    def _scattered_cell(self) -> str:
        """The problem if bytes that may not be cut apart are not contiguous; else empty. Strides within them would
        declare their order, which is unknown."""
        granule, held, size = self.token_granule, len(self.units), self.state_bytes
        token_inner = granule == 1 or self.token_stride == size
        if self.units_divide:
            return "" if token_inner else f"a granule of {granule} states is not contiguous within a unit"
        if granule > 1 and held > 1:
            heads_first = token_inner and granule == self.page_tokens and self.unit_stride == granule * size
            tokens_first = self.unit_stride == size and self.token_stride == held * size
            return "" if heads_first or tokens_first else "an undivided page is not contiguous"
        contiguous = token_inner and (held == 1 or self.unit_stride == size)
        return "" if contiguous else f"{held} undivided units of a granule are not contiguous"


_ASSIGN = tuple(getattr(Plane, attribute.name).__set__ for attribute in fields(Plane))
_values = attrgetter(*(attribute.name for attribute in fields(Plane)))
