"""The check of one layer with a recurrent state, which vLLM's kernels write through views of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvferry.errors import LayoutMismatch
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import PLAIN
from kvferry.integrations.vllm.layouts import Layer
from kvferry.integrations.vllm.self_check.probe import POISONS, Probe, shown
from kvferry.integrations.vllm.self_check.structure import check_elements
from kvferry.integrations.vllm.self_check.write_paths import StatePath


def check_states(layer: Layer, planes: Sequence[Plane], path: StatePath, blocks: Sequence[int]) -> list[str]:
    """Write each part of a block's state through vLLM's own view of it; check that planes declare exactly its bytes.

    A part whose first axis is the units of one plane is compared by value, unit by unit. A part of two axes, which are
    rows and channels, is also written row by row.

    Returns:
        The components that were compared by value.

    Raises:
        LayoutMismatch: the planes are wrong.
    """
    by_value: set[str] = set()
    for block in blocks:
        parts = [state[block] for state in path.states]
        written = [(state, block, block + 1) for state in path.states]
        probe = Probe(layer.name, planes, block, layer.cache, written)  # type: ignore[arg-type]
        try:
            for number, part in enumerate(parts):
                by_value |= _check_part(probe, number, part)
        finally:
            probe.restore()
    return sorted(by_value)


def _check_part(probe: Probe, number: int, part: torch.Tensor) -> set[str]:
    first = int(part.data_ptr())
    size = part.numel() * part.element_size()
    drawn = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
    content = drawn.to(part.device).view(part.dtype).reshape(part.shape)
    own = [
        index
        for index, plane in enumerate(probe.planes)
        if first <= plane.base + probe.block * plane.block_stride < first + size
    ]
    allowed, by_value = probe.nothing(), set()
    dtype = str(part.dtype).removeprefix("torch.")
    for index in own:
        allowed[index].fill_(True)
        plane = probe.planes[index]
        check_elements(probe.layer, dtype, [plane])
        if plane.format == PLAIN and _by_unit(plane, part):
            by_value.add(plane.component)

    def compare() -> None:
        for index in own:
            plane = probe.planes[index]
            if plane.component not in by_value:
                continue
            expected = content.contiguous().view(torch.uint8).reshape(len(plane.units), -1)
            found = probe.cells[index].permute(1, 0, 2, 3).reshape(len(plane.units), -1)
            differs = (found != expected).any(-1)
            if differs.any():
                unit = int(differs.nonzero()[0])
                problem = "what stands there is not what vLLM wrote"
                raise probe.error(index, 0, unit, 0, *shown(expected[unit], found[unit]), problem)

    changed = [torch.zeros_like(cells, dtype=torch.bool) for cells in probe.cells]
    for poison in POISONS:
        probe.fill(poison)
        found = probe.effect(partial(part.copy_, content), allowed, compare)  # type: ignore[arg-type]
        changed = [one | other for one, other in zip(changed, found, strict=True)]
    for index in own:
        missed = ~changed[index].all(-1)
        if missed.any():
            raise probe.missing(index, missed)
    if sum(int(changed[index].sum()) for index in own) != size:
        raise LayoutMismatch(
            probe.layer, f"part {number} of its state is not declared whole", expected=size, found="fewer bytes"
        )
    if part.dim() == 2:
        _check_rows(probe, part, content, own)
    return by_value


def _check_rows(probe: Probe, part: torch.Tensor, content: torch.Tensor, own: Sequence[int]) -> None:
    """Write the first and the last row alone: only cells of that row may change."""
    axis = 1 if is_conv_state_dim_first() else 0
    rows = part.shape[axis]
    by_row = [index for index in own if probe.planes[index].block_states == rows and rows > 1]
    if len(by_row) < len(own):
        return
    for row in (0, rows - 1):
        allowed = probe.nothing()
        for index in by_row:
            plane = probe.planes[index]
            allowed[index][row // plane.page_tokens, :, row % plane.page_tokens] = True
        probe.fill(POISONS[0])
        write = partial(part.select(axis, row).copy_, content.select(axis, row))
        probe.effect(write, allowed)  # type: ignore[arg-type]


def _by_unit(plane: Plane, part: torch.Tensor) -> bool:
    held = prod(part.shape[1:]) * part.element_size()
    return len(plane.units) == part.shape[0] and plane.block_states * plane.state_bytes == held
