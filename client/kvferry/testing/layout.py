"""Checks planes against an engine: the engine's own kernels write, and their bytes must be at the declared addresses,
and nowhere else.

An engine can check each rank when it starts: before its first request, and before it captures graphs of its device.
Needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import PLAIN
from kvferry.testing._layer_bytes import POISONS, Probe, check_elements, check_tensor, mismatch, of_granules
from kvferry.testing._layer_bytes import SCALED as SCALED

MORE_BLOCKS = 4
"""Blocks that are drawn for each check beside the first and the last: a kernel may write other blocks elsewhere."""

Tokens = Mapping[str, torch.Tensor]
"""Inputs of an engine's write for some tokens, by component: ``[tokens, heads, width]`` each."""
WriteTokens = Callable[[Tokens, torch.Tensor], None]
"""Writes tokens into slots, ``int64 [tokens]``: block * tokens of a block + token in the block."""


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
    check_tensor(group, tensor, planes, block_bytes)
    if not states and (write is None or token is None):
        return CheckedLayout()
    blocks, values = _drawn(group, random.Random(seed)), set[int]()
    for number, block in enumerate(blocks):
        probe = Probe(planes, block, tensor, group.num_blocks)
        try:
            if write is not None and token is not None:
                values |= _TokenCheck(group, probe, write, token).run(thorough=number < 2, dependence=not number)
            own = [probe.planes_in(state[block]) for state in states]
            if write is None:
                _check_all_held(planes, own)
            for index, state in enumerate(states):
                values |= _check_state(probe, index, state[block], own[index])
        finally:
            probe.restore()
    by_value = tuple(plane.component for index, plane in enumerate(planes) if index in values)
    rest = tuple(plane.component for index, plane in enumerate(planes) if index not in values)
    return CheckedLayout(by_value, rest, tuple(sorted(blocks)))


def _drawn(group: Group, draw: random.Random) -> list[int]:
    """Return two blocks far apart, to show a wrong distance, then others; the null block only as a last resort."""
    usable = [block for block in (1, 0, group.num_blocks - 1) if block < group.num_blocks]
    usable = [block for block in usable if block != group.null_block] or usable
    ends = sorted({usable[0], usable[-1]})
    between = range(ends[0] + 1, ends[-1])
    drawn = draw.sample(between, min(MORE_BLOCKS, len(between)))
    return [*ends, *(block for block in drawn if block != group.null_block)]


class _TokenCheck:
    """The check of one block that the engine writes token by token; see `check_layout` for `write` and `token`."""

    def __init__(self, group: Group, probe: Probe, write: WriteTokens, token: Tokens) -> None:
        self._probe, self._planes, self._write = probe, probe.planes, write
        for plane in self._planes:
            # With slots that the cache does not have, the engine would write past the cache.
            self._states = group.block_tokens // plane.token_shard.count
            if plane.block_states != self._states:
                declared = f"a block of {plane.component} is declared to hold {plane.block_states} tokens"
                problem = f"{declared}, the group's {self._states}"
                raise mismatch(plane, problem, self._states, plane.block_states)
        self._device = probe.device
        generator = torch.Generator().manual_seed(probe.block)
        self._inputs = {
            # No values near zero, which quantising would make equal.
            name: (drawn + drawn.sign() * 0.25).to(self._device, taken.dtype)
            for name, taken in token.items()
            for drawn in [torch.randn(self._states, *taken.shape, generator=generator)]
        }
        # Another sign, for formats that divide by the largest element, and another size.
        self._others: dict[str, torch.Tensor] = {name: found * -1.5 for name, found in self._inputs.items()}
        self._expected = {
            number: self._cells_of_inputs(plane)
            for number, plane in enumerate(self._planes)
            if plane.format == PLAIN
            and plane.component in token
            and plane.dtype == str(token[plane.component].dtype).removeprefix("torch.")
        }
        """The cells in natural order, by the index of their plane: compared by value with the inputs."""

    def run(self, *, thorough: bool, dependence: bool) -> set[int]:
        """Check the block; return the indices of the planes that were compared by value. If `thorough`, also write the
        first and the last granule of each size alone; if `dependence`, check on which inputs the other planes depend.
        """
        self._check_granule(0, self._states)
        for granule in sorted({plane.token_granule for plane in self._planes} - {self._states}) if thorough else ():
            self._check_granule(0, granule)
            self._check_granule(self._states - granule, self._states)
        if dependence and len(self._expected) < len(self._planes):
            self._check_dependence()
        return set(self._expected)

    def _cells_of_inputs(self, plane: Plane) -> torch.Tensor:
        wrote = self._inputs[plane.component].view(torch.uint8)
        declared = len(plane.units), plane.state_bytes
        if wrote.shape[1:] != declared:
            said = f"{plane.component} is declared to hold {declared[0]} heads of {declared[1]} bytes"
            problem = f"{said}, the engine writes {wrote.shape[1]} of {wrote.shape[2]}"
            raise mismatch(plane, problem, tuple(wrote.shape[1:]), declared)
        return wrote

    def _write_tokens(self, inputs: Tokens, first: int, end: int) -> None:
        slots = self._probe.block * self._states + torch.arange(first, end, device=self._device)
        self._write({name: found[first:end].contiguous() for name, found in inputs.items()}, slots)

    def _check_granule(self, first: int, end: int) -> None:
        """Write tokens ``[first, end)``: their cells must change, and no others; in planes with larger granules, some
        cells of the granule. If these are all tokens, compare them by value as well."""
        chosen = self._none_chosen()
        for tokens in chosen.values():
            tokens[first:end] = True
        # Only formats with a name of their own have bytes that are never written, and never whole granules of them.
        exact = [plane.format == PLAIN and plane.token_granule <= end - first for plane in self._planes]
        expected = self._expected if end - first == self._states else {}
        self._probe.check(partial(self._write_tokens, self._inputs, first, end), self._cells(chosen), exact, expected)

    def _check_dependence(self) -> None:
        """Write the block again with other inputs for some tokens and heads: only cells of those may change.

        The choices are the bits, and the inverted bits, of a number of each input, token and head, so that each cell is
        distinguished from every other.
        """
        rest = [plane for number, plane in enumerate(self._planes) if number not in self._expected]
        numbers, count = {}, 0
        for name, found in self._inputs.items():
            granules = [plane.token_granule for plane in rest if name in self._inputs_of(plane)]
            if granules:
                # Tokens that no plane distinguishes have one number.
                finest, heads = min(granules), found.shape[1]
                held = self._states // finest * heads
                by_granule = torch.arange(count, count + held, device=self._device).reshape(-1, heads)
                numbers[name] = by_granule.repeat_interleave(finest, 0)
                count += held
        self._probe.fill(POISONS[0])
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
                changed = self._probe.effect(write, self._cells(chosen), {})
                touched = [known | found.any(-1) for known, found in zip(touched, changed, strict=True)]
        for number, (plane, found) in enumerate(zip(self._planes, touched, strict=True)):
            # Scales need not change with the values that they scale.
            if number not in self._expected and not plane.component.endswith("_scale"):
                self._probe.check_written(number, ~of_granules(found, plane.token_granule))

    def _cells(self, chosen: Tokens) -> list[torch.Tensor]:
        """Return the whole granules of some tokens and heads, ``bool [tokens, heads]`` by input, as cells by plane."""
        found = []
        for plane in self._planes:
            cells = torch.zeros(self._states, len(plane.units), dtype=torch.bool, device=self._device)
            for name in self._inputs_of(plane):
                # Units that are not the heads, or that may not be divided: any head changes all units.
                by_unit = chosen[name].shape[1] == len(plane.units) and plane.units_divide
                cells |= chosen[name] if by_unit else chosen[name].any(1, keepdim=True)
            found.append(of_granules(cells, plane.token_granule))
        return found

    def _inputs_of(self, plane: Plane) -> list[str]:
        """Return the inputs of a plane: by its name (``key`` for key and key_scale), or else all inputs."""
        named = [name for name in self._inputs if f"{plane.component}_".startswith(f"{name}_")]
        return named or list(self._inputs)

    def _none_chosen(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(found[..., 0], dtype=torch.bool) for name, found in self._inputs.items()}


def _check_all_held(planes: Sequence[Plane], own: Sequence[Sequence[int]]) -> None:
    """Check that every plane is part of some state: what nothing writes to would count as checked."""
    for index, plane in enumerate(planes):
        if not any(index in held for held in own):
            problem = f"{plane.component} is declared, but lies in none of the engine's states"
            raise LayoutMismatch(plane.layer, problem, component=plane.component)


def _check_state(probe: Probe, number: int, state: torch.Tensor, own: Sequence[int]) -> set[int]:
    """Check a block's view `state` of one recurrent state, in which the planes with the indices `own` lie; return the
    indices of the planes that were compared by value: where the first axis is the units of one plane."""
    size = state.numel() * state.element_size()
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(state.device)
    content = drawn.view(state.dtype).reshape(state.shape)
    planes = [probe.planes[index] for index in own]
    check_elements(str(state.dtype).removeprefix("torch."), planes)
    allowed, expected = probe.nothing(), {}
    for index, plane in zip(own, planes, strict=True):
        allowed[index].fill_(True)
        natural = plane.format == PLAIN and len(plane.units) == state.shape[0]
        if natural and plane.bytes_per_block == size:
            expected[index] = drawn.reshape(len(plane.units), plane.block_states, -1).transpose(0, 1)
    probe.check(partial(state.copy_, content), allowed, [True] * len(allowed), expected)
    held = sum(plane.bytes_per_block for plane in planes)
    if held != size:
        problem = f"part {number} of its state is not declared whole"
        raise LayoutMismatch(probe.planes[0].layer, problem, expected=size, found=held)
    # The planes decide which axis counts the rows; nothing is checked if both axes could.
    axes = [axis for axis in range(state.dim()) if {plane.block_states for plane in planes} == {state.shape[axis]}]
    rows = state.shape[axes[0]] if state.dim() == 2 and len(axes) == 1 else 1
    for row in {0, rows - 1} if rows > 1 else ():
        # Only cells of this row may change.
        allowed = probe.nothing()
        for index in own:
            allowed[index][row] = True
        probe.fill(POISONS[0])
        probe.effect(partial(state.select(axes[0], row).copy_, content.select(axes[0], row)), allowed, {})
    return set(expected)
