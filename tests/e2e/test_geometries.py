"""Geometries of every kind over real NIXL: one process holds all ranks of the source, the test holds the destination's.

The bytes of the source are a function of (request, layer, component, unit, state) alone, written through the address
formula of a plane, so what arrives is checked against what should be there and not against what the planner thinks.
Destinations are poisoned first, and every byte that nobody asked for must still be poison.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineSpec,
    Group,
    GroupKind,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    Read,
    StagingOptions,
)
from kvferry.demo.pattern import POISON, Bytes, blocks_view, expected, wanted
from kvferry.errors import Incompatible
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.geometry_file import parse, rank_bytes, rebase
from tests.e2e import pairwise
from tests.e2e.world import unique_id

GQA = {"layers": 4, "kv_heads": 8, "head_dim": 16, "dtype": "bfloat16", "attention": "gqa"}
MLA = {"layers": 3, "dtype": "bfloat16", "attention": "mla", "latent_dim": 64, "rope_dim": 16}
BASE = {"engine_id": "x", "tp_size": 1, "block_size": 16, "num_blocks": 64, "layout": "HND", "model": GQA}
WINDOWED = [
    {"name": "full", "layers": [0, 2], "pool": "kv", "null_block": 0},
    {"name": "window", "kind": "window", "window": 40, "layers": [1, 3], "pool": "kv", "null_block": 0},
]
STATE = [
    {"name": "full", "layers": [1, 3]},
    {
        "name": "mamba",
        "kind": "state",
        "num_blocks": 8,
        "rows": "rows_first",
        "layers": [0, 2],
        "components": [
            {"name": "conv_x", "units": 64, "rows": 3},
            {"name": "conv_b", "units": 16, "rows": 3},
            {"name": "ssm", "units": 8, "content": 128, "dtype": "float32"},
        ],
    },
]
SPARSE = [
    {
        "name": "full",
        "kv": "blocks_first",
        "tokens_per_state": 4,
        "components": [
            {"name": "latent"},
            {"name": "rope"},
            {"name": "index", "content": 32, "dtype": "float8_e4m3fn", "layers": [[0, 2]]},
            {"name": "index_scale", "content": 1, "dtype": "float32", "layers": [[0, 2]]},
        ],
    }
]


@dataclass(frozen=True)
class Case:
    """A pair of geometries, what is read, and over what."""

    source: dict[str, Any]
    destination: dict[str, Any]
    tokens: int = 75
    held: int = 0
    ucx_tls: str = ""
    path: str = "auto"


CASES = {
    "tp3-to-tp2": Case(
        {"tp_size": 3, "model": {**GQA, "kv_heads": 6}}, {"tp_size": 2, "model": {**GQA, "kv_heads": 6}}
    ),
    "tp5-to-tp7": Case(
        {"tp_size": 5, "model": {**GQA, "kv_heads": 35}}, {"tp_size": 7, "model": {**GQA, "kv_heads": 35}}
    ),
    "uneven-to-tp2": Case({"tp_size": 3, "shards": [[0, 3], [3, 4], [4, 8]]}, {"tp_size": 2}, ucx_tls="tcp"),
    "replicas-to-tp1": Case(
        {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}, {"tp_size": 1, "model": {**GQA, "kv_heads": 2}}
    ),
    "tp1-to-replicas": Case({"model": {**GQA, "kv_heads": 2}}, {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}),
    "replicas-to-replicas": Case(
        {"tp_size": 6, "model": {**GQA, "kv_heads": 2}}, {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}, ucx_tls="tcp"
    ),
    "hnd-to-nhd": Case({"tp_size": 2}, {"tp_size": 1, "layout": "NHD"}),
    "nhd-to-hnd-packed": Case({"tp_size": 2, "layout": "NHD"}, {"tp_size": 4, "kv": "packed"}, held=37),
    "apart-to-blocks-first": Case({"tp_size": 2, "kv": "apart"}, {"tp_size": 2, "kv": "blocks_first"}, ucx_tls="tcp"),
    "blocks-16-to-64": Case({"tp_size": 2}, {"tp_size": 4, "block_size": 64, "num_blocks": 16}, held=21),
    "blocks-64-to-16": Case({"tp_size": 4, "block_size": 64, "num_blocks": 16}, {"tp_size": 2}, held=21),
    "blocks-48-to-32": Case(
        {"tp_size": 1, "block_size": 48, "layout": "NHD"}, {"tp_size": 2, "block_size": 32}, tokens=200, ucx_tls="tcp"
    ),
    "pipeline": Case({"tp_size": 2, "pp_size": 2}, {"tp_size": 1, "pp_size": 4}),
    "pipeline-uneven": Case({"pp_size": 2, "stages": [[0, 3], [3, 4]]}, {"tp_size": 4, "pp_size": 2}, ucx_tls="tcp"),
    "window-in-a-pool": Case({"tp_size": 2, "groups": WINDOWED}, {"tp_size": 4, "groups": WINDOWED}, tokens=150),
    "window-other-blocks": Case(
        {"tp_size": 4, "groups": WINDOWED}, {"tp_size": 1, "block_size": 32, "groups": WINDOWED}, tokens=150
    ),
    "state-beside-attention": Case({"tp_size": 2, "groups": STATE}, {"tp_size": 4, "groups": STATE}),
    "state-from-more-ranks": Case({"tp_size": 4, "groups": STATE}, {"tp_size": 1, "groups": STATE}, ucx_tls="tcp"),
    "mla-striped-over-replicas": Case({"tp_size": 4, "model": MLA}, {"tp_size": 1, "model": MLA}, tokens=300),
    "mla-every-reader-once": Case({"tp_size": 2, "model": MLA}, {"tp_size": 4, "model": MLA}, tokens=100, held=16),
    "compressed-with-indexer": Case(
        {"tp_size": 2, "model": MLA, "groups": SPARSE},
        {"tp_size": 1, "model": MLA, "groups": SPARSE, "block_size": 32},
        tokens=120,
    ),
    "dcp-to-whole": Case(
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
        {"tp_size": 2, "model": MLA, "block_size": 16},
        tokens=130,
    ),
    "whole-to-dcp": Case(
        {"tp_size": 2, "model": MLA, "block_size": 16},
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 4}},
        tokens=130,
        ucx_tls="tcp",
    ),
    "dcp-to-dcp-gqa": Case(
        {"tp_size": 4, "block_size": 32, "token_shard": {"count": 2, "interleave": 2}},
        {"tp_size": 8, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
        tokens=130,
    ),
}


def document(changes: dict[str, Any]) -> EngineGeometry:
    return parse({**BASE, **changes})


def allocate(engine: EngineGeometry, tokens: int, held: int, seed: int) -> dict[str, Blocks]:
    """Blocks for one request, by the definition of a block table; scattered, never the null block, unique per pool."""
    random = np.random.default_rng(seed)
    free: dict[str, list[int]] = {}
    blocks = {}
    for group in engine.groups:
        ids = free.setdefault(
            group.pool or group.name,
            [int(i) for i in random.permutation(group.num_blocks) if i != group.null_block],
        )
        first = held
        if group.kind is GroupKind.STATE:
            blocks[group.name] = Blocks([ids.pop()], state_token=tokens)
            continue
        if group.kind is GroupKind.WINDOW:
            first = max(held, tokens - group.window_tokens) // group.block_tokens * group.block_tokens
        count = -(-tokens // group.block_tokens) - first // group.block_tokens
        blocks[group.name] = Blocks([ids.pop() for _ in range(count)], first_token=first, end_token=tokens)
    return blocks


def numbers(group: Group, blocks: Blocks) -> range:
    """Which blocks of the request these are."""
    first = 0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens
    return range(first, first + len(blocks.ids))


class HeldRanks:
    """All ranks of an engine in this process, each with memory of its own."""

    def __init__(self, address: str, engine: EngineGeometry, ucx_tls: str, *, serve: bool, path: str = "auto") -> None:
        self.engine = engine
        # Slots that hold a few blocks only, so that reads take many batches.
        staging = StagingOptions(path=path, slot_bytes=16 << 10, slots=3)
        self.client = Client(address, options=NixlOptions(ucx_tls=ucx_tls), staging=staging)
        self.spec = EngineSpec(unique_id("engine"), engine.groups, len(engine.ranks))
        self.session = self.client.open_engine(self.spec)
        self.ranks: list[tuple[Cache, Bytes, RankGeometry]] = []
        for rank in engine.ranks:
            cells = np.full(rank_bytes(rank), POISON, np.uint8)
            placed = rebase(rank, cells.ctypes.data)
            region = MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, cells.nbytes)
            cache = self.client.register_cache(
                self.spec,
                rank.rank,
                planes=placed.planes,
                regions=[region],
                keep=cells,
                labels=rank.labels,
                serve=serve,
            )
            self.ranks.append((cache, cells, placed))

    def fill(self, request: str, blocks: dict[str, Blocks]) -> None:
        for _, cells, rank in self.ranks:
            for plane in rank.planes:
                listed = blocks[plane.group]
                which = numbers(self.engine.group(plane.group), listed)
                blocks_view(cells, cells.ctypes.data, plane)[listed.ids] = expected(request, plane, which)

    def faults(self, request: str, blocks: dict[str, Blocks], tokens: int, held: int) -> list[str]:
        """Planes with a wrong byte, and ranks with a byte that nobody asked for."""
        found = []
        for cache, cells, rank in self.ranks:
            for plane in rank.planes:
                listed, group = blocks[plane.group], self.engine.group(plane.group)
                which = numbers(group, listed)
                must, may = wanted(plane, group, tokens, which, held)
                view = blocks_view(cells, cells.ctypes.data, plane)
                got = view[listed.ids]
                if not np.array_equal(got[must], expected(request, plane, which)[must]):
                    found.append(f"rank {cache.rank.rank}: {plane.name} is wrong")
                got[may] = POISON
                view[listed.ids] = got
            if not (cells == POISON).all():
                found.append(f"rank {cache.rank.rank}: {int((cells != POISON).sum())} bytes were written unasked")
        return found

    def close(self) -> None:
        self.client.close()


def hold_sources(address: str, pipe: Connection) -> None:
    """The process of the sources: one engine after another."""
    while True:
        try:
            engine, request, blocks, ucx_tls = pipe.recv()
        except EOFError:
            return
        source = HeldRanks(address, engine, ucx_tls, serve=True)
        source.fill(request, blocks)
        pipe.send(source.session.publish(request, blocks).reference)
        pipe.recv()
        pipe.send([release.outcome.name for release in source.session.released(timeout=20)])
        source.close()


@pytest.fixture(scope="module")
def sources(homes: tuple[str, str]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_sources, args=(homes[0], theirs), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join(20)


ROWS = pairwise.rows()
COVER = [Case(*pairwise.documents(row), *pairwise.tokens(row), path=row["path"]) for row in ROWS]


def test_the_cover_has_every_pair_of_levels_that_can_be() -> None:
    levels = {
        (a, x, b, y) for (a, xs), (b, ys) in itertools.combinations(pairwise.FACTORS.items(), 2) for x in xs for y in ys
    }
    covered = set().union(*(pairwise.pairs(row) for row in ROWS))
    assert levels - covered == set(pairwise.INFEASIBLE)


@pytest.mark.parametrize("case", COVER, ids=[" ".join(row.values()).replace(" ", "_") for row in ROWS])
def test_pair_of_the_cover_is_moved_exactly(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    move(sources, homes, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pair_of_geometries_is_moved_exactly(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    move(sources, homes, case)


def move(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    """One request from one engine to the other."""
    source, destination = document(case.source), document(case.destination)
    theirs = allocate(source, case.tokens, 0, 1)
    mine = allocate(destination, case.tokens, case.held, 2)
    sources.send((source, "request", theirs, case.ucx_tls))
    held = HeldRanks(homes[1], destination, case.ucx_tls, serve=False, path=case.path)
    try:
        reference = sources.recv()
        reads: list[Read] = [
            cache.read(reference, mine, (case.held, case.tokens), read_id="r", parties=len(held.ranks))
            for cache, _, _ in held.ranks
        ]
        results = [read.result(30) for read in reads]
        assert held.faults("request", mine, case.tokens, case.held) == []
        assert all(result.confirmed for result in results)
        if case.path != "auto":
            assert [r.staged_bytes for r in results] == [r.bytes if case.path == "staged" else 0 for r in results]
    finally:
        held.close()
        sources.send("done")
    assert sources.recv() == ["READ"]


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        (
            {"format": "opaque", "granule": 16, "units_divide": False},
            {"format": "opaque", "granule": 32, "units_divide": False, "block_size": 32},
            "granule",
        ),
        ({"model": {**GQA, "dtype": "float16"}}, {}, "dtype"),
        ({"tp_size": 2, "shards": [[0, 3], [4, 8]]}, {}, "units"),
    ],
    ids=["page-opaque-unequal-pages", "dtype", "hole"],
)
def test_pair_that_cannot_be_read_is_refused_at_handshake(
    sources: Connection, homes: tuple[str, str], source: dict[str, Any], destination: dict[str, Any], reason: str
) -> None:
    theirs, mine = document(source), document(destination)
    sources.send((theirs, "request", allocate(theirs, 32, 0, 1), ""))
    held = HeldRanks(homes[1], mine, "", serve=False)
    try:
        reference = sources.recv()
        read = held.ranks[0][0].read(reference, allocate(mine, 32, 0, 2))
        with pytest.raises(Incompatible, match=reason):
            read.result(30)
        assert (held.ranks[0][1] == POISON).all()
        held.client.decline(reference)
    finally:
        held.close()
        sources.send("done")
    assert sources.recv() == ["DECLINED"]
