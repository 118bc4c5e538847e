"""Caches as an engine keeps them, in torch tensors on a device, and the expected bytes of reads, by plain slicing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry import Group

POISON = -0x5A5B
"""The filling of a cache before a read: 0xA5A5 in each element."""
CANONICAL = ("kv", "block", "head", "token", "content")

LAYOUTS = {
    "heads first": ("kv", "block", "head", "token", "content"),
    "tokens first": ("kv", "block", "token", "head", "content"),
    "blocks first": ("block", "kv", "head", "token", "content"),
    "one storage": ("block", "kv", "token", "head", "content"),
}
"""Axes of a layer's tensor as it lies in memory. In ``one storage`` the layers alternate from block to block."""


@dataclass(frozen=True)
class Shape:
    """A cache of one group."""

    layers: int = 2
    heads: int = 6
    head_dim: int = 32
    block_tokens: int = 16
    num_blocks: int = 24

    def group(self) -> Group:
        return Group("full", block_tokens=self.block_tokens, num_blocks=self.num_blocks)

    @property
    def token_bytes(self) -> int:
        """Of all heads, layers, keys and values."""
        return self.layers * 2 * self.heads * self.head_dim * 2


@dataclass(frozen=True)
class Written:
    """Tokens ``[first, end)`` of a request, in blocks of a cache.

    Attributes:
        seed: names the request; its KV is made from it.
        ids: the blocks, from that of token `first` on.
        cleared: what the blocks hold behind `end` is zero.
    """

    seed: int
    ids: tuple[int, ...]
    end: int
    first: int = 0
    cleared: bool = False


def kv(shape: Shape, written: Written) -> torch.Tensor:
    """The KV of a request for all heads of the model, ``int16[layer, kv, head, token, content]``, from token 0 on."""
    generator = torch.Generator().manual_seed(written.seed)
    # Token by token, so that a longer part of a request begins with the shorter one.
    size = (written.end, shape.layers, 2, shape.heads, shape.head_dim)
    return torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=generator).permute(1, 2, 3, 0, 4)


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """The heads of a rank: [r·H // n, (r+1)·H // n)."""
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


class TorchCache:
    """The cache of one rank: a tensor of bfloat16 for each layer, full of poison.

    Args:
        shape: of the whole model's cache.
        heads: those of this rank.
        layout: a name of `LAYOUTS`.
        device: as torch names it.
    """

    def __init__(self, shape: Shape, heads: range, layout: str, device: str) -> None:
        self.shape, self.heads, self.layout, self.device = shape, heads, layout, torch.device(device)
        self.axes = LAYOUTS[layout]
        sizes = {"kv": 2, "block": shape.num_blocks, "head": len(heads)}
        sizes |= {"token": shape.block_tokens, "content": shape.head_dim}
        size = [sizes[axis] for axis in self.axes]
        if layout == "one storage":
            whole = torch.empty((size[0], shape.layers, *size[1:]), dtype=torch.bfloat16, device=device)
            layers = list(whole.unbind(1))
        else:
            layers = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]
        self.tensors = {f"layers.{index}": layer for index, layer in enumerate(layers)}
        self.poison()

    def poison(self) -> None:
        """Forget everything."""
        for tensor in self.tensors.values():
            tensor.view(torch.int16).fill_(POISON)
        self.synchronize()

    def write(self, *written: Written) -> None:
        """Put requests into their blocks, as an engine's forward would have. Returns when the device has done it."""
        for tensor, filled in zip(self.tensors.values(), self._with(written, poisoned=False), strict=True):
            tensor.view(torch.int16).copy_(filled)
        self.synchronize()

    def wrong(self, *written: Written) -> str:
        """Compare every byte with a poisoned cache that holds these requests and nothing else.

        The bytes are copied from the device on a new stream and with no synchronisation before, as an engine's next
        kernel would read them.

        Returns:
            The first difference, in words; empty if there is none.
        """
        for layer, expected in zip(self.tensors, self._with(written, poisoned=True), strict=True):
            found = self._fetched(self.tensors[layer]).view(torch.int16)
            differing = (self._canonical(found) != self._canonical(expected)).nonzero()
            if len(differing):
                place = dict(zip(CANONICAL, differing[0].tolist(), strict=True))
                return f"{len(differing)} elements of {layer} on {self.device} differ, the first at {place}"
        return ""

    def fill(self, seed: int) -> None:
        """Put random bytes into every block."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.view(torch.int16).random_(generator=generator)
        self.synchronize()

    def digest(self, ids: Sequence[int]) -> list[int]:
        """A number for the content of some blocks in their order, for each layer."""
        chosen = torch.tensor(ids, device=self.device)
        found = []
        for tensor in self.tensors.values():
            values = self._canonical(tensor.view(torch.int16))[:, chosen].long().flatten()
            found.append(int((values * torch.arange(1, len(values) + 1, device=self.device)).sum()))
        return found

    def synchronize(self) -> None:
        """Wait until the device has done all its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return tensor
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            fetched = tensor.to("cpu", non_blocking=True)
        stream.synchronize()
        return fetched

    def _with(self, written: Sequence[Written], *, poisoned: bool) -> list[torch.Tensor]:
        """The layers on the host, as they lie in memory, with requests written over what was there."""
        found = [tensor.view(torch.int16).cpu().clone() for tensor in self.tensors.values()]
        if poisoned:
            for tensor in found:
                tensor.fill_(POISON)
        size = self.shape.block_tokens
        for each in written:
            values = kv(self.shape, each)[:, :, self.heads.start : self.heads.stop]
            for layer, tensor in enumerate(found):
                blocks = self._canonical(tensor)
                for token in range(each.first, each.end):
                    block = each.ids[token // size - each.first // size]
                    blocks[:, block, :, token % size] = values[layer, :, :, token]
                if each.cleared:
                    self._clear(blocks, each)
        return found

    def _clear(self, blocks: torch.Tensor, each: Written) -> None:
        size = self.shape.block_tokens
        for place, block in enumerate(each.ids, each.first // size):
            blocks[:, block, :, max(0, each.end - place * size) :] = 0

    def _canonical(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute([self.axes.index(axis) for axis in CANONICAL])
