"""Reads of requests of 64 to 131,072 tokens, their blocks in one run and scattered."""

from __future__ import annotations

from benchmarks.caches import Layout
from benchmarks.destinations import port_engine
from benchmarks.large_reads import Case, compare
from benchmarks.measures import FULL, Effort, Measure, Topic
from benchmarks.node_server import node_server
from benchmarks.sources import source
from kvferry import NixlOptions

LAYOUT = Layout(layers=4, head_dim=32, num_blocks=8448)
"""A block is 64 KiB, in pieces of 8 KiB: small, so that 131,072 tokens fit this machine."""

TOKENS = (64, 512, 4096, 32_768, 131_072)
SHAPES = ("one run", "scattered")


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    layout = LAYOUT if not effort.smoke else Layout(layers=1, head_dim=32, num_blocks=64)
    measures: list[Measure] = []
    with (
        node_server() as server,
        source(server.address, layout, raw=[NixlOptions()]) as made,
        port_engine(server.address, layout) as engine,
    ):
        for tokens in TOKENS if not effort.smoke else TOKENS[:1]:
            blocks = tokens // layout.block_tokens
            for shape in SHAPES:
                case = Case(label(tokens, shape), layout, blocks, blocks if shape == SHAPES[0] else 1)
                rounds = effort.repeats(20 if tokens <= 4096 else 3)
                measures += compare(case, made, {"kvferry": engine}, {"raw NIXL": NixlOptions()}, rounds)
    return Topic("lengths", "Requests of 64 to 131,072 tokens, 64 KiB per block of 16", tuple(measures))


def label(tokens: int, shape: str) -> str:
    """How a request is called in the names of measures."""
    return f"{tokens:,} tokens, {shape}"
