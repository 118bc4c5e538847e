"""The values that the processes of two hosts exchange, about homes, ranks and requests, and a request's bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry import Publication, TlsConfig
from tests.support.caches import POISON, Model

MODEL = Model(layers=4, heads=4, head_dim=16, num_blocks=256)


@dataclass(frozen=True)
class Home:
    """The home of a client.

    Attributes:
        address: of its node server.
        tls: for the homes of other hosts.
        more: arguments of `kvferry.Client`.
        options: of NIXL.
    """

    address: str
    tls: TlsConfig
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A rank's part in its engine.

    Attributes:
        engine_id, num_ranks: of the engine.
        rank: its index.
        units: heads that it holds, ``[begin, end)``.
        token: the engine's; empty: its scheduler is in this process.
        serve: whether others read from it.
    """

    engine_id: str
    num_ranks: int = 1
    rank: int = 0
    units: tuple[int, int] = (0, MODEL.heads)
    token: str = ""
    serve: bool = True


@dataclass(frozen=True)
class Request:
    """A request whose blocks were published.

    Attributes:
        publication: as its source knows it.
        ids: the source's blocks.
        seed: of its content and its prompt.
    """

    publication: Publication
    ids: tuple[int, ...]
    seed: int

    @property
    def tokens(self) -> list[int]:
        """Its prompt."""
        return prompt(self.seed, len(self.ids))


def prompt(seed: int, blocks: int) -> list[int]:
    """The tokens of a request."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 1 << 17, blocks * MODEL.block_tokens).tolist()
    return tokens


def content(seed: int, blocks: int) -> dict[tuple[int, str], np.ndarray]:
    """A request's content, by (layer, component): ``uint8[blocks, heads, tokens, state_bytes]``; never the poison."""
    random = np.random.default_rng(seed)
    shape = (blocks, MODEL.heads, MODEL.block_tokens, MODEL.state_bytes(""))
    return {
        (layer, component): random.integers(0, POISON, shape, np.uint8)
        for layer in range(MODEL.layers)
        for component in MODEL.components
    }
