"""Checks planes against an engine: the engine's own kernels write, and their bytes must be at the declared addresses,
and nowhere else.

An engine can check each rank when it starts: before its first request, and before it captures graphs of its device.
Needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import PLAIN, view_of

SCALED = " * "
"""Separates the name of an element type from a static scale, in the `dtype` of a plane."""

MORE_BLOCKS = 4
"""Blocks that are drawn for each check beside the first and the last: a kernel may write other blocks elsewhere."""

_POISONS = (0xA5, 0x5A)
"""Bytes to fill memory with before a write. A written byte differs from at least one of the two."""

_SHOWN = 16
"""Bytes that an error shows of each side."""

_MOST_BETWEEN = 1 << 20
"""Most bytes between a block and its neighbours that are always watched."""

_BYTES = ("uint8", "int8")
"""Types of tensors that may hold elements of any type, or of several types beside each other."""

Tokens = Mapping[str, torch.Tensor]
"""Inputs of an engine's write for some tokens, by component: ``[tokens, heads, width]`` each."""
WriteTokens = Callable[[Tokens, torch.Tensor], None]
"""Writes tokens into slots, ``int64 [tokens]``: block * tokens of a block + token in the block."""
_Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckedLayout:
    """How the planes of a layer were checked.

    Attributes:
        values: components whose bytes were compared with the engine's inputs.
        footprint: components for which the check has shown that the engine's writes change their bytes, and no others.
        blocks: ids of the written blocks, rising.
    """

    values: tuple[str, ...] = ()
    footprint: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()


def check_layout(
    group: Group,
    tensor: torch.Tensor,
    planes: Sequence[Plane],
    *,
    write: WriteTokens | None = None,
    token: Tokens | None = None,
    states: Sequence[torch.Tensor] = (),
    block_bytes: int | None = None,
    seed: int | None = None,
) -> CheckedLayout:
    """Check the planes of one layer against its tensor, and against the engine's writes into the tensor.

    Strides, sizes and types are compared first: the planes must tile the tensor. Then the engine writes into some
    blocks, in memory that was filled with known bytes, and every byte that changes must be declared. Bytes in natural
    order are compared with the engine's inputs. Quantised bytes, and bytes in an order of the kernel's own, are checked
    by their dependence on the inputs: the block is written again with other tokens and heads, and only the cells of
    those may change. The check cannot see the order of bytes within such a cell (the format's name stands for it), and
    where the scales of a component begin in the bytes that depend on it.

    Nothing else may use the tensor meanwhile. Its bytes are restored. Waits for the device. This check does not find
    layers that share memory: see `kvferry.geometry.overlap.check_apart`.

    Args:
        group: the layer's group: the number of blocks, and the null block, which is not written to.
        tensor: the tensor of the planes, ``[blocks, ...]``; the first axis may count pages of which each block has
            several. Use `torch.Tensor.movedim` for another axis.
        planes: the layer's planes.
        write: the engine's own function to write tokens, each of which is a state of the planes; None: no tokens are
            written.
        token: the inputs of `write` for one token, by component: tensors of the right dtype and shape,
            ``[heads, width]``, whose values do not matter. A plane of another name, such as ``key_scale``, depends on
            the component that begins its name (``key``), or else on all components.
        states: the engine's own views of recurrent states, ``[blocks, ...]`` each, which are written to as a whole.
        block_bytes: bytes of a block without padding, as the engine counts them; None: as many as the tensor has.
        seed: for the choice of blocks, and the inputs; None: other blocks at each call.

    Raises:
        LayoutMismatch: the planes are wrong; do not read by them. The error names the component, block, token and head,
            with the expected bytes and the bytes that were found.
        InvalidField: there are no planes, or `write` without `token`, or the other way around.
    """
    if (write is None) != (token is None):
        raise InvalidField("token", token is not None, "tensors of one token if there is a function to write it")
    _check_tensor(group, tensor, planes, block_bytes)
    if not states and (write is None or token is None):
        return CheckedLayout()
    blocks, values = _drawn(group, random.Random(seed)), set[str]()
    for number, block in enumerate(blocks):
        probe = _Probe(planes, block, tensor, group.num_blocks)
        try:
            if write is not None and token is not None:
                values |= _TokenCheck(group, probe, write, token).run(thorough=number < 2, dependence=not number)
            checks = [_StateCheck(probe, index, state[block]) for index, state in enumerate(states)]
            if write is None:
                _check_all_held(planes, checks)
            for check in checks:
                values |= check.run()
        finally:
            probe.restore()
    by_value = tuple(plane.component for plane in planes if plane.component in values)
    rest = tuple(plane.component for plane in planes if plane.component not in values)
    return CheckedLayout(by_value, rest, tuple(sorted(blocks)))


def _check_tensor(group: Group, tensor: torch.Tensor, planes: Sequence[Plane], block_bytes: int | None) -> None:
    """Check that the planes of a layer tile its tensor, without overlaps, and without gaps but for padding."""
    if not planes:
        raise InvalidField("planes", 0, "the planes of a layer")
    layer = planes[0].layer
    view, blocks = view_of(tensor), group.num_blocks
    pages, rest = divmod(view.shape[0], blocks)
    if rest or not pages:
        raise LayoutMismatch(layer, f"{view.described} is not made of {blocks} blocks")
    _check_elements(view.dtype, planes)
    stride, memory = view.strides[0] * pages, f"{view.memory_kind.name} {view.device}"
    for plane in planes:
        for what, declared, expected in (
            ("its group", plane.group, group.name),
            ("the number of its blocks", plane.num_blocks, blocks),
            ("the distance of its blocks", plane.block_stride if blocks > 1 else stride, stride),
            ("its memory", f"{plane.memory_kind.name} {plane.device}", memory),
        ):
            if declared != expected:
                problem = f"{what} is not that of the tensor, for {plane.component}"
                raise _mismatch(plane, problem, expected, declared)
    tail = max(1, view.contiguous_tail)
    axes = [(pages, view.strides[0]), *zip(view.shape[1:tail], view.strides[1:tail], strict=True)]
    begins, ends, _ = _runs(_starts(view.address, axes), view.tail_bytes(tail))
    cells = [_starts(plane.base, _axes(plane)) for plane in planes]
    of = np.repeat(np.arange(len(planes)), [len(found) for found in cells])
    sizes = np.array([plane.state_bytes for plane in planes], np.int64)[of]
    first, last, clash = _runs(np.concatenate(cells), sizes)
    if clash is not None:
        first_named, second_named = (planes[of[at]].component for at in clash)
        problem = f"{first_named} and {second_named} declare the same bytes of a block"
        raise LayoutMismatch(layer, problem, component=first_named)
    at = np.searchsorted(begins, first, "right") - 1
    outside = (at < 0) | (last > ends[at])
    if outside.any():
        byte = int(first[outside][0]) - view.address
        raise LayoutMismatch(layer, f"its planes declare bytes {byte} ... of block 0, which are not its tensor's")
    held, expected_bytes = int((last - first).sum()), int((ends - begins).sum())
    if block_bytes is not None:
        expected_bytes = block_bytes
    if held != expected_bytes:
        raise LayoutMismatch(
            layer,
            f"its planes declare {held} bytes of a block, which holds {expected_bytes}",
            expected=expected_bytes,
            found=held,
        )


def _check_elements(dtype: str, planes: Iterable[Plane]) -> None:
    """Check the names of the planes' element types against the tensor's type: the engines of a read compare only these
    names."""
    for plane in planes:
        if dtype not in _BYTES and plane.dtype.partition(SCALED)[0] != dtype:
            problem = f"elements of {plane.component} are declared to be {plane.dtype}, those of its tensor are {dtype}"
            raise _mismatch(plane, problem, dtype, plane.dtype)


def _mismatch(plane: Plane, problem: str, expected: object, found: object) -> LayoutMismatch:
    return LayoutMismatch(plane.layer, problem, component=plane.component, expected=expected, found=found)


def _axes(plane: Plane) -> list[tuple[int, int]]:
    """Return the axes of a block's cells, (count, bytes): page, unit, state within the page."""
    return [
        (plane.pages, plane.page_stride),
        (len(plane.units), plane.unit_stride),
        (plane.page_tokens, plane.token_stride),
    ]


def _starts(address: int, axes: Iterable[tuple[int, int]]) -> _Addresses:
    """Return the addresses of all indices along axes of (count, stride)."""
    found = np.full(1, address, np.int64)
    for count, stride in axes:
        found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return found


def _runs(starts: _Addresses, sizes: _Addresses | int) -> tuple[_Addresses, _Addresses, tuple[int, int] | None]:
    """Return the begins and ends of runs of bytes that do not touch, by rising address; and the indices of two cells
    that share a byte, or None."""
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = begins + np.broadcast_to(np.asarray(sizes), starts.shape)[order]
    shared = np.flatnonzero(begins[1:] < ends[:-1])
    clash = (int(order[shared[0]]), int(order[shared[0] + 1])) if len(shared) else None
    cuts = np.flatnonzero(begins[1:] != ends[:-1])
    return begins[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)], clash


def _drawn(group: Group, draw: random.Random) -> list[int]:
    """Return two blocks far apart, so that a wrong distance of blocks shows, and then some others; the null block only
    if there are no others."""
    usable = [block for block in (1, 0, group.num_blocks - 1) if block < group.num_blocks]
    usable = [block for block in usable if block != group.null_block] or usable
    ends = sorted({usable[0], usable[-1]})
    between = range(ends[0] + 1, ends[-1])
    drawn = draw.sample(between, min(MORE_BLOCKS, len(between)))
    return [*ends, *(block for block in drawn if block != group.null_block)]


class _Probe:
    """A block of a layer, with the memory near the block that a wrong write would hit.

    Addresses come from the fields of the planes alone, independently of the planner. All bytes of the planes lie in the
    tensor. `cells` has the block's cells by plane, ``uint8 [pages, units, page tokens, state bytes]``.
    """

    def __init__(self, planes: Sequence[Plane], block: int, tensor: torch.Tensor, blocks: int) -> None:
        self.planes, self.block = planes, block
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.cells = []
        for plane in planes:
            sizes, strides = zip(*_axes(plane), strict=True)
            first = plane.base + block * plane.block_stride - storage.data_ptr()
            self.cells.append(memory.as_strided((*sizes, plane.state_bytes), (*strides, 1), first))
        self._watched = [*self.cells, _surroundings(memory, tensor, block, tensor.shape[0] // blocks)]
        self._saved = [watched.clone() for watched in self._watched]

    def fill(self, poison: int) -> None:
        for watched in self._watched:
            watched.fill_(poison)

    def restore(self) -> None:
        for watched, saved in zip(self._watched, self._saved, strict=True):
            watched.copy_(saved)

    def nothing(self) -> list[torch.Tensor]:
        """Return a selection of no cells, by plane: ``bool [pages, units, page tokens]``."""
        return [torch.zeros(cells.shape[:3], dtype=torch.bool, device=cells.device) for cells in self.cells]

    def effect(
        self,
        write: Callable[[], object],
        allowed: Sequence[torch.Tensor],
        inspect: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Make a write, undo it, and return the bytes that it changed, by plane, in the shape of `cells`.

        `allowed` are the cells that the write may change, by plane, as `nothing` returns them: raises `LayoutMismatch`
        for a change elsewhere. `inspect` is called between the write and its undoing.
        """
        before = [watched.clone() for watched in self._watched]
        write()
        if inspect is not None:
            inspect()
        changed = []
        for cells, was, chosen in zip(self.cells, before, allowed, strict=False):
            changed.append(cells != was)
            cells.copy_(torch.where(chosen[..., None], was, cells))
        for watched, was in zip(self._watched, before, strict=True):
            if not torch.equal(watched, was):
                raise self._outside(watched, was)
        return changed

    def effect_on_any(
        self,
        write: Callable[[], object],
        allowed: Sequence[torch.Tensor],
        inspect: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Return the bytes that a write changes, whatever their values before; see `effect`."""
        changed: list[torch.Tensor] = []
        for poison in _POISONS:
            self.fill(poison)
            found = self.effect(write, allowed, inspect)
            changed = [known | more for known, more in zip(changed, found, strict=True)] if changed else found
        return changed

    def check_written(self, number: int, missed: torch.Tensor) -> None:
        """Raise `LayoutMismatch` for the first cell of a plane, if any, that a write has left unchanged."""
        if missed.any():
            cell = tuple(int(index) for index in missed.nonzero()[0])
            found, problem = _hex(self.cells[number][cell]), "the engine did not write bytes that it holds"
            raise self._error(number, cell, "what the engine writes there", found, problem)

    def check_equal(self, number: int, expected: torch.Tensor) -> None:
        """Raise `LayoutMismatch` for the first cell of a plane, if any, that differs from `expected`, which has the
        shape of `cells`: the first token first, then the first unit."""
        differs = (self.cells[number] != expected).any(-1)
        if differs.any():
            page, at, unit = (int(index) for index in differs.permute(0, 2, 1).nonzero()[0])
            cells = expected[page, unit, at], self.cells[number][page, unit, at]
            # Begin a little before the first difference.
            first = int((cells[0] != cells[1]).nonzero()[0]) // _SHOWN * _SHOWN
            pair = _hex(cells[0][first:]), _hex(cells[1][first:])
            raise self._error(number, (page, unit, at), *pair, "what stands there is not what the engine wrote")

    def _error(self, number: int, cell: tuple[int, ...], expected: str, found: str, problem: str) -> LayoutMismatch:
        """Return the error about one cell: page, unit, state within the page."""
        plane, (page, unit, at) = self.planes[number], cell
        token, head = page * plane.page_tokens + at, plane.units.begin + unit
        return LayoutMismatch(
            plane.layer,
            f"{plane.component} of token {token}, head {head}, in block {self.block}: {problem}",
            component=plane.component,
            block=self.block,
            token=token,
            head=head,
            expected=expected,
            found=found,
        )

    def _outside(self, watched: torch.Tensor, was: torch.Tensor) -> LayoutMismatch:
        """Return the error about the first byte of watched memory that has changed."""
        index = tuple(int(each) for each in (watched != was).nonzero()[0])
        row, shown = index[:-1], slice(index[-1], index[-1] + _SHOWN)
        expected, found = _hex(was[row][shown]), _hex(watched[row][shown])
        address = int(watched[index].data_ptr())
        for number, plane in enumerate(self.planes):
            begins = _starts(plane.base + self.block * plane.block_stride, _axes(plane))
            hit = np.flatnonzero((begins <= address) & (address < begins + plane.state_bytes))
            if len(hit):
                cell = np.unravel_index(int(hit[0]), [count for count, _ in _axes(plane)])
                problem = "the engine changed its bytes when it wrote others"
                return self._error(number, tuple(map(int, cell)), expected, found, problem)
        first = self.planes[0]
        at = address - first.base - self.block * first.block_stride
        return LayoutMismatch(
            first.layer,
            f"the engine wrote a byte that no plane declares, {at} bytes after the first of {first.component} in"
            f" block {self.block}",
            block=self.block,
            expected=expected,
            found=found,
        )


def _hex(found: torch.Tensor) -> str:
    return bytes(found[:_SHOWN].tolist()).hex()


def _surroundings(memory: torch.Tensor, tensor: torch.Tensor, block: int, pages: int) -> torch.Tensor:
    """Return the bytes of a block and of its neighbours, and, unless there are too many, the bytes between them:
    padding, and other layers' pages."""
    near = tensor[max(0, block - 1) * pages : (block + 2) * pages]
    size = near.element_size()
    begin = near.storage_offset() * size
    end = begin + sum((count - 1) * step * size for count, step in zip(near.shape, near.stride(), strict=True)) + size
    if end - begin <= max(_MOST_BETWEEN, 4 * near.numel() * size):
        return memory[begin:end]
    return near.unsqueeze(-1).view(torch.uint8)


class _TokenCheck:
    """The check of one block that the engine writes token by token; see `check_layout` for `write` and `token`."""

    def __init__(self, group: Group, probe: _Probe, write: WriteTokens, token: Tokens) -> None:
        self._probe, self._planes, self._write = probe, probe.planes, write
        for plane in self._planes:
            # With slots that the cache does not have, the engine would write past the cache.
            self._states = group.block_tokens // plane.token_shard.count
            if plane.block_states != self._states:
                declared = f"a block of {plane.component} is declared to hold {plane.block_states} tokens"
                problem = f"{declared}, the group's {self._states}"
                raise _mismatch(plane, problem, self._states, plane.block_states)
        self._device = probe.cells[0].device
        self._heads = {name: taken.shape[0] for name, taken in token.items()}
        generator = torch.Generator().manual_seed(probe.block)
        self._inputs = {
            # No values near zero, which quantising would make equal.
            name: (drawn + drawn.sign() * 0.25).to(self._device, taken.dtype)
            for name, taken in token.items()
            for drawn in [torch.randn(self._states, *taken.shape, generator=generator)]
        }
        # Another sign, for formats that divide by the largest element, and another size.
        self._others: dict[str, torch.Tensor] = {name: found * -1.5 for name, found in self._inputs.items()}
        self._by_value = [
            plane.format == PLAIN
            and plane.component in token
            and plane.dtype == str(token[plane.component].dtype).removeprefix("torch.")
            for plane in self._planes
        ]

    def run(self, *, thorough: bool, dependence: bool) -> set[str]:
        """Check the block; return the components that were compared by value. If `thorough`, also write the first and
        the last granule of each size alone; if `dependence`, check on which inputs the other components depend."""
        self._check_granule(0, self._states)
        for granule in sorted({plane.token_granule for plane in self._planes} - {self._states}) if thorough else ():
            self._check_granule(0, granule)
            self._check_granule(self._states - granule, self._states)
        if dependence and not all(self._by_value):
            self._check_dependence()
        return {plane.component for plane, compared in zip(self._planes, self._by_value, strict=True) if compared}

    def _write_tokens(self, inputs: Tokens, first: int, end: int) -> None:
        slots = self._probe.block * self._states + torch.arange(first, end, device=self._device)
        self._write({name: found[first:end].contiguous() for name, found in inputs.items()}, slots)

    def _check_granule(self, first: int, end: int) -> None:
        """Write tokens ``[first, end)``: their cells must change, and no others; in planes with larger granules, some
        cells of the granule. If these are all tokens, compare them by value as well."""
        whole = end - first == self._states
        chosen = self._none_chosen()
        for tokens in chosen.values():
            tokens[first:end] = True
        allowed = self._cells(chosen)
        write = partial(self._write_tokens, self._inputs, first, end)
        changed = self._probe.effect_on_any(write, allowed, self._compare if whole else None)
        for number, (plane, found) in enumerate(zip(self._planes, changed, strict=True)):
            # Only formats with a name of their own have bytes that are never written, and never whole granules of them.
            exact = plane.format == PLAIN and plane.token_granule <= end - first
            written = found.all(-1) if exact else _of_granules(found.any(-1), plane)
            self._probe.check_written(number, allowed[number] & ~written)

    def _check_dependence(self) -> None:
        """Write the block again with other inputs for some tokens and heads: only cells of those may change.

        The choices are the bits, and the inverted bits, of a number of each input, token and head, so that each cell is
        distinguished from every other.
        """
        numbers, count = {}, 0
        for name, heads in self._heads.items():
            granules = [
                plane.token_granule
                for plane, compared in zip(self._planes, self._by_value, strict=True)
                if not compared and name in self._inputs_of(plane)
            ]
            if granules:
                # Tokens that no plane distinguishes have one number.
                finest = min(granules)
                held = self._states // finest * heads
                by_granule = torch.arange(count, count + held, device=self._device).reshape(-1, heads)
                numbers[name] = by_granule.repeat_interleave(finest, 0)
                count += held
        self._probe.fill(_POISONS[0])
        self._write_tokens(self._inputs, 0, self._states)
        touched = self._probe.nothing()
        for bit in range(max(1, (count - 1).bit_length())):
            for value in (0, 1):
                chosen = self._none_chosen()
                chosen.update({name: (number >> bit) & 1 == value for name, number in numbers.items()})
                inputs = {
                    name: torch.where(chosen[name][..., None], self._others[name], found)
                    for name, found in self._inputs.items()
                }
                write = partial(self._write_tokens, inputs, 0, self._states)
                changed = self._probe.effect(write, self._cells(chosen))
                touched = [known | found.any(-1) for known, found in zip(touched, changed, strict=True)]
        for number, (plane, found) in enumerate(zip(self._planes, touched, strict=True)):
            # Scales need not change with the values that they scale.
            if not self._by_value[number] and not plane.component.endswith("_scale"):
                self._probe.check_written(number, ~_of_granules(found, plane))

    def _compare(self) -> None:
        """Compare cells in natural order with the inputs."""
        for number, plane in enumerate(self._planes):
            if not self._by_value[number]:
                continue
            wrote = self._inputs[plane.component].view(torch.uint8)
            declared = len(plane.units), plane.state_bytes
            if wrote.shape[1:] != declared:
                said = f"{plane.component} is declared to hold {declared[0]} heads of {declared[1]} bytes"
                problem = f"{said}, the engine writes {wrote.shape[1]} of {wrote.shape[2]}"
                raise _mismatch(plane, problem, tuple(wrote.shape[1:]), declared)
            expected = wrote.reshape(plane.pages, plane.page_tokens, *declared).permute(0, 2, 1, 3)
            self._probe.check_equal(number, expected)

    def _cells(self, chosen: Tokens) -> list[torch.Tensor]:
        """Return the cells of some tokens and heads, ``bool [tokens, heads]`` for each input, by plane, as whole
        granules."""
        found = []
        for plane in self._planes:
            granules = torch.stack([self._granules(plane, chosen[name]) for name in self._inputs_of(plane)]).any(0)
            by_token = granules.repeat_interleave(plane.token_granule, 0)
            found.append(by_token.reshape(plane.pages, plane.page_tokens, -1).permute(0, 2, 1))
        return found

    def _granules(self, plane: Plane, chosen: torch.Tensor) -> torch.Tensor:
        """Return which units of which granules have some of the chosen tokens and heads: ``[granules, units]``."""
        by_granule = chosen.reshape(self._states // plane.token_granule, plane.token_granule, -1).any(1)
        if by_granule.shape[1] == len(plane.units) and plane.units_divide:
            return by_granule
        # Units that are not the heads, or that may not be divided: any head changes all units.
        return by_granule.any(1, keepdim=True).expand(-1, len(plane.units))

    def _inputs_of(self, plane: Plane) -> list[str]:
        """Return the inputs of a plane: by its name (``key`` for key and key_scale), or else all inputs."""
        named = [name for name in self._inputs if f"{plane.component}_".startswith(f"{name}_")]
        return named or list(self._inputs)

    def _none_chosen(self) -> dict[str, torch.Tensor]:
        shapes = {name: (self._states, heads) for name, heads in self._heads.items()}
        return {name: torch.zeros(shape, dtype=torch.bool, device=self._device) for name, shape in shapes.items()}


def _of_granules(cells: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Whether the granule of each cell has one of the given cells: ``[pages, units, page tokens]``."""
    granules = cells.reshape(plane.pages, len(plane.units), -1, plane.token_granule).any(-1)
    return granules.repeat_interleave(plane.token_granule, -1)


def _check_all_held(planes: Sequence[Plane], checks: Iterable[_StateCheck]) -> None:
    """Check that every plane is part of some state: what nothing writes to would count as checked."""
    held = {index for check in checks for index in check.own}
    for index, plane in enumerate(planes):
        if index not in held:
            problem = f"{plane.component} is declared, but lies in none of the engine's states"
            raise LayoutMismatch(plane.layer, problem, component=plane.component)


class _StateCheck:
    """The check of one recurrent state in a block, which kernels write through a view of the block.

    A state whose first axis is the units of one plane is compared by value, unit by unit. A state of two axes, rows and
    channels, is also written row by row. `state` is the engine's view; `own` are the indices of the planes in it.
    """

    def __init__(self, probe: _Probe, number: int, state: torch.Tensor) -> None:
        self._probe, self._number, self._state = probe, number, state
        self._size = state.numel() * state.element_size()
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randint(0, 256, (self._size,), dtype=torch.uint8, generator=generator)
        self._content = drawn.to(state.device).view(state.dtype).reshape(state.shape)
        first = int(state.data_ptr())
        self.own = [
            index
            for index, plane in enumerate(probe.planes)
            if first <= plane.base + probe.block * plane.block_stride < first + self._size
        ]

    def run(self) -> set[str]:
        """Return the components that were compared by value."""
        planes = [self._probe.planes[index] for index in self.own]
        _check_elements(str(self._state.dtype).removeprefix("torch."), planes)
        allowed = self._probe.nothing()
        for index in self.own:
            allowed[index].fill_(True)
        changed = self._probe.effect_on_any(partial(self._state.copy_, self._content), allowed, self._compare)
        for index in self.own:
            self._probe.check_written(index, ~changed[index].all(-1))
        held = sum(int(changed[index].sum()) for index in self.own)
        if held != self._size:
            problem = f"part {self._number} of its state is not declared whole"
            raise LayoutMismatch(self._probe.planes[0].layer, problem, expected=self._size, found=held)
        if self._state.dim() == 2:
            self._check_rows(planes)
        return {plane.component for plane in planes if self._by_unit(plane)}

    def _compare(self) -> None:
        for index in self.own:
            plane = self._probe.planes[index]
            if self._by_unit(plane):
                wrote = self._content.contiguous().view(torch.uint8)
                by_unit = wrote.reshape(len(plane.units), plane.pages, plane.page_tokens, plane.state_bytes)
                self._probe.check_equal(index, by_unit.permute(1, 0, 2, 3))

    def _by_unit(self, plane: Plane) -> bool:
        held = prod(self._state.shape[1:]) * self._state.element_size()
        natural = plane.format == PLAIN and len(plane.units) == self._state.shape[0]
        return natural and plane.block_states * plane.state_bytes == held

    def _check_rows(self, planes: Sequence[Plane]) -> None:
        """Write the first and the last row alone: only cells of that row may change. The planes decide which axis
        counts the rows; nothing is checked if both axes could."""
        axes = [axis for axis in (0, 1) if {plane.block_states for plane in planes} == {self._state.shape[axis]}]
        rows = self._state.shape[axes[0]] if len(axes) == 1 else 1
        for row in {0, rows - 1} if rows > 1 else ():
            allowed = self._probe.nothing()
            for index, plane in zip(self.own, planes, strict=True):
                allowed[index][row // plane.page_tokens, :, row % plane.page_tokens] = True
            self._probe.fill(_POISONS[0])
            write = partial(self._state.select(axes[0], row).copy_, self._content.select(axes[0], row))
            self._probe.effect(write, allowed)
