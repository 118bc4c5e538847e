"""The check of one layer whose cache vLLM writes token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from kvferry.errors import LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import PLAIN
from kvferry.integrations.vllm.layouts import Layer
from kvferry.integrations.vllm.self_check.probe import POISONS, Probe, shown
from kvferry.integrations.vllm.self_check.write_paths import Inputs, TokenPath


def check_tokens(
    layer: Layer, planes: Sequence[Plane], path: TokenPath, blocks: Sequence[int], *, alike: bool = False
) -> list[str]:
    """Write tokens as vLLM does, and check that the planes declare exactly the bytes that it has written.

    In every block: the whole block. In the first two, also the first and the last granule of each size alone. Natural
    bytes are compared with what was written. Bytes in an order of the kernel's own, and quantised ones, are compared by
    what they depend on: the block is written again with other inputs for some tokens and heads, and only the cells of
    those may change. The choices are the bits of a number of each input, token and head, and their opposites, so that
    each cell is told from every other. What this cannot see: the order of the bytes within such a cell, which is the
    format's name to say, and where the scales of a component begin in the bytes that depend on it.

    Args:
        layer: the layer.
        planes: its planes.
        path: how vLLM writes it.
        blocks: ids of the blocks to write.
        alike: a layer of the same kind has passed, so writing whole blocks is enough.

    Returns:
        The components that were compared by value.

    Raises:
        LayoutMismatch: the planes are wrong.
    """
    states = int(layer.spec.block_size)
    pages = states // path.page_tokens
    for plane in planes:
        if plane.block_states != states:
            raise LayoutMismatch(
                layer.name,
                f"a block of {plane.component} is declared to hold {plane.block_states} tokens, vLLM writes {states}",
                component=plane.component,
                expected=states,
                found=plane.block_states,
            )
    _prime(path)
    by_value = [plane.component for plane in planes if _natural(plane, path)]
    for block in blocks:
        written = path.cache, block * pages, (block + 1) * pages
        probe = Probe(layer.name, planes, block, layer.cache, [written])  # type: ignore[arg-type]
        writer = _Writer(path, planes, block, states)
        try:
            _check_whole(probe, writer)
            if alike or block not in blocks[:2]:
                continue
            for granule in sorted({plane.token_granule for plane in planes} - {states}):
                _check_granule(probe, writer, 0, granule)
                _check_granule(probe, writer, states - granule, states)
            if len(by_value) < len(planes) and block == blocks[0]:
                _check_dependence(probe, writer)
        finally:
            probe.restore()
    return by_value


class _Writer:
    """Writes tokens of one block, and knows which cells each of them belongs to.

    Attributes:
        planes: the layer's planes.
        states: tokens of the block.
        inputs: one choice of inputs for all of its tokens.
        others: another, which differs in every element.
    """

    def __init__(self, path: TokenPath, planes: Sequence[Plane], block: int, states: int) -> None:
        self.path, self.planes, self.states = path, planes, states
        self._block = block
        random = torch.Generator().manual_seed(block)
        device = path.cache.device
        self.inputs: dict[str, torch.Tensor] = {}
        for name, (heads, width) in path.shapes.items():
            drawn = torch.randn(states, heads, width, generator=random)
            # Nothing near zero, which quantising would make equal.
            self.inputs[name] = (drawn + drawn.sign() * 0.25).to(device, path.dtype)
        # Another sign, for formats that divide by the largest element, and another size.
        self.others: dict[str, torch.Tensor] = {name: found * -1.5 for name, found in self.inputs.items()}

    def write(self, inputs: Inputs, first: int, end: int) -> None:
        """Write tokens ``[first, end)`` of the block."""
        begin = self._block * self.states
        slots = torch.arange(begin + first, begin + end, dtype=torch.int64, device=self.path.cache.device)
        self.path.write({name: found[first:end].contiguous() for name, found in inputs.items()}, slots)

    def cells(self, chosen: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the cells of some tokens and heads, by plane, whole granules of them.

        Args:
            chosen: ``bool [tokens, heads]`` for each input.
        """
        found = []
        for plane in self.planes:
            granules = torch.stack([self._granules(plane, chosen[name]) for name in self.inputs_of(plane)]).any(0)
            by_token = granules.repeat_interleave(plane.token_granule, 0)
            found.append(by_token.reshape(plane.pages, plane.page_tokens, -1).permute(0, 2, 1))
        return found

    def _granules(self, plane: Plane, chosen: torch.Tensor) -> torch.Tensor:
        """Which units of which granules have some of the chosen tokens and heads: ``[granules, units]``."""
        by_granule = chosen.reshape(self.states // plane.token_granule, plane.token_granule, -1).any(1)
        if by_granule.shape[1] == len(plane.units) and plane.units_divide:
            return by_granule
        # Units that are not the heads, or that may not be told apart: any head changes all.
        return by_granule.any(1, keepdim=True).expand(-1, len(plane.units))

    def inputs_of(self, plane: Plane) -> list[str]:
        """Return the inputs that a plane is made of: by its name, ``key`` of key and key_scale, or all of them."""
        named = [name for name in self.inputs if f"{plane.component}_".startswith(f"{name}_")]
        return named or list(self.inputs)

    def chosen(self, value: bool) -> dict[str, torch.Tensor]:
        """Return all tokens and heads, or none."""
        device = self.path.cache.device
        return {
            name: torch.full((self.states, heads), value, dtype=torch.bool, device=device)
            for name, (heads, _) in self.path.shapes.items()
        }


def _prime(path: TokenPath) -> None:
    """Write padding, which vLLM's kernels skip: with its first call a backend may prepare the whole cache, as Triton's
    does for the scales of each token and head."""
    device = path.cache.device
    inputs = {name: torch.zeros(1, *shape, dtype=path.dtype, device=device) for name, shape in path.shapes.items()}
    path.write(inputs, torch.full((1,), -1, dtype=torch.int64, device=device))


def _check_whole(probe: Probe, writer: _Writer) -> None:
    """Write the whole block: every cell is written, and nothing else."""
    allowed = writer.cells(writer.chosen(True))
    write = partial(writer.write, writer.inputs, 0, writer.states)
    changed = _of_two(probe, write, allowed, partial(_compare, probe, writer))
    for number, (plane, found) in enumerate(zip(writer.planes, changed, strict=True)):
        # Only formats with a name of their own have bytes that nothing is ever written to, and never whole granules.
        missed = ~found.all(-1) if plane.format == PLAIN else ~_of_granules(found.any(-1), plane)
        if missed.any():
            raise probe.missing(number, missed)


def _check_granule(probe: Probe, writer: _Writer, first: int, end: int) -> None:
    """Write one granule: its cells are written, and nothing else; of planes with larger granules, some of those."""
    chosen = writer.chosen(False)
    for tokens in chosen.values():
        tokens[first:end] = True
    allowed = writer.cells(chosen)
    changed = _of_two(probe, partial(writer.write, writer.inputs, first, end), allowed, None)
    for number, (plane, found) in enumerate(zip(writer.planes, changed, strict=True)):
        whole = plane.format == PLAIN and plane.token_granule <= end - first
        written = found.all(-1) if whole else _of_granules(found.any(-1), plane)
        missed = allowed[number] & ~written
        if missed.any():
            raise probe.missing(number, missed)


def _check_dependence(probe: Probe, writer: _Writer) -> None:
    """Write the block again with other inputs for some tokens and heads: only cells of those may change."""
    device = writer.path.cache.device
    numbers, count = {}, 0
    for name, (heads, _) in writer.path.shapes.items():
        granules = [
            plane.token_granule
            for plane in writer.planes
            if name in writer.inputs_of(plane) and not _natural(plane, writer.path)
        ]
        if granules:
            # Tokens that no plane tells apart have one number.
            finest = min(granules)
            held = writer.states // finest * heads
            by_granule = torch.arange(count, count + held, device=device).reshape(-1, heads)
            numbers[name] = by_granule.repeat_interleave(finest, 0)
            count += held
    probe.fill(POISONS[0])
    writer.write(writer.inputs, 0, writer.states)
    touched = probe.nothing()
    for bit in range(max(1, (count - 1).bit_length())):
        for value in (0, 1):
            chosen = writer.chosen(False)
            chosen.update({name: (number >> bit) & 1 == value for name, number in numbers.items()})
            inputs = {
                name: torch.where(chosen[name][..., None], writer.others[name], found)
                for name, found in writer.inputs.items()
            }
            changed = probe.effect(partial(writer.write, inputs, 0, writer.states), writer.cells(chosen))
            touched = [known | found.any(-1) for known, found in zip(touched, changed, strict=True)]
    for number, (plane, found) in enumerate(zip(writer.planes, touched, strict=True)):
        missed = ~_of_granules(found, plane)
        # Scales need not change with what they scale.
        exempt = _natural(plane, writer.path) or plane.component.endswith("_scale")
        if missed.any() and not exempt:
            raise probe.missing(number, missed)


def _compare(probe: Probe, writer: _Writer) -> None:
    """Compare what stands in natural cells with what was written."""
    for number, plane in enumerate(writer.planes):
        if not _natural(plane, writer.path):
            continue
        wrote = writer.inputs[plane.component].contiguous().view(torch.uint8)
        if wrote.shape[1:] != (len(plane.units), plane.state_bytes):
            raise LayoutMismatch(
                probe.layer,
                f"{plane.component} is declared to hold {len(plane.units)} heads of {plane.state_bytes} bytes, vLLM"
                f" writes {wrote.shape[1]} of {wrote.shape[2]}",
                component=plane.component,
                expected=tuple(wrote.shape[1:]),
                found=(len(plane.units), plane.state_bytes),
            )
        expected = wrote.reshape(plane.pages, plane.page_tokens, *wrote.shape[1:]).permute(0, 2, 1, 3)
        differs = (probe.cells[number] != expected).any(-1)
        if differs.any():
            # The first token first, then the first head.
            page, at, unit = (int(index) for index in differs.permute(0, 2, 1).nonzero()[0])
            pair = shown(expected[page, unit, at], probe.cells[number][page, unit, at])
            raise probe.error(number, page, unit, at, *pair, "what stands there is not what vLLM wrote")


def _of_two(
    probe: Probe, write: partial[None], allowed: Sequence[torch.Tensor], inspect: partial[None] | None
) -> list[torch.Tensor]:
    """Return the bytes that a write changes, whatever stood there before."""
    changed: list[torch.Tensor] = []
    for poison in POISONS:
        probe.fill(poison)
        found = probe.effect(write, allowed, inspect)
        changed = [one | other for one, other in zip(changed, found, strict=True)] if changed else found
    return changed


def _of_granules(cells: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Whether a granule has one of some cells: ``[pages, units, page tokens]``, as the cells are."""
    granules = cells.reshape(plane.pages, len(plane.units), -1, plane.token_granule).any(-1)
    return granules.repeat_interleave(plane.token_granule, -1)


def _natural(plane: Plane, path: TokenPath) -> bool:
    return plane.format == PLAIN and path.copies and plane.component in path.shapes
