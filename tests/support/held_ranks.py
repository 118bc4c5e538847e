"""Engines of declared geometry whose ranks are all in one process, and one request that moves between two of them.

The bytes of the source are a function of (request, layer, component, unit, state) alone, written through the address
formula of a plane, so what arrives is checked against what should be there and not against what the planner thinks.
Destinations are poisoned first, and every byte that nobody asked for must still be poison.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from examples.demo import POISON, Bytes, blocks_view, expected, wanted
from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineSpec,
    Group,
    GroupKind,
    IntegrityOptions,
    MemoryKind,
    MemoryRegion,
    NixlOptions,
    Read,
    StagingOptions,
)
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.geometry.file import parse, rank_bytes, rebase
from tests.support.geometry_cases import BASE, Case
from tests.support.identifiers import unique_id


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


def little_staging(path: Any = "auto") -> StagingOptions:
    """Slots that hold a few blocks only, so that reads take many batches."""
    return StagingOptions(path=path, slot_bytes=16 << 10, slots=3)


class HeldRanks:
    """All ranks of an engine in this process, each with memory of its own."""

    def __init__(
        self,
        address: str,
        engine: EngineGeometry,
        ucx_tls: str,
        *,
        serve: bool,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        warm_up_timeout: float = 20.0,
    ) -> None:
        self.engine = engine
        options = NixlOptions(ucx_tls=ucx_tls, warm_up_timeout=warm_up_timeout)
        self.client = Client(address, options=options, staging=staging, integrity=integrity)
        self.spec = EngineSpec(unique_id("engine"), engine.groups, len(engine.ranks), partial=engine.partial)
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
                replicated=True,
                keep=cells,
                labels=rank.labels,
                serve=serve,
            )
            self.ranks.append((cache, cells, placed))

    def fill(self, request: str, blocks: dict[str, Blocks]) -> None:
        """Write a request's bytes."""
        for _, cells, rank in self.ranks:
            for plane in rank.planes:
                listed = blocks[plane.group]
                which = numbers(self.engine.group(plane.group), listed)
                blocks_view(cells, cells.ctypes.data, plane)[listed.ids] = expected(request, plane, which)

    def faults(self, request: str, blocks: dict[str, Blocks], tokens: int, held: int) -> list[str]:
        """Planes with a wrong byte, and ranks with a byte that nobody asked for."""
        found = []
        for cache, memory, rank in self.ranks:
            # A copy, since more may be arriving.
            cells = memory.copy()
            for plane in rank.planes:
                listed, group = blocks[plane.group], self.engine.group(plane.group)
                which = numbers(group, listed)
                must, may = wanted(plane, group, tokens, which, held)
                view = blocks_view(cells, memory.ctypes.data, plane)
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
        source = HeldRanks(address, engine, ucx_tls, serve=True, staging=little_staging())
        source.fill(request, blocks)
        pipe.send(source.session.publish(request, blocks).reference)
        pipe.recv()
        pipe.send([release.outcome.name for release in source.session.released(timeout=20)])
        source.close()


def move(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    """One request from one engine to the other."""
    source, destination = document(case.source), document(case.destination)
    theirs = allocate(source, case.tokens, 0, 1)
    mine = allocate(destination, case.tokens, case.held, 2)
    sources.send((source, "request", theirs, case.ucx_tls))
    held = HeldRanks(homes[1], destination, case.ucx_tls, serve=False, staging=little_staging(case.path))
    try:
        reference = sources.recv()
        reads: list[Read] = [
            cache.read(reference, mine, (case.held, case.tokens), read_id="r", parties=len(held.ranks))
            for cache, _, _ in held.ranks
        ]
        results = [read.result(30) for read in reads]
        assert held.faults("request", mine, case.tokens, case.held) == []
        if case.path != "auto":
            assert [r.staged_bytes for r in results] == [r.bytes if case.path == "staged" else 0 for r in results]
    except BaseException:
        held.close()
        sources.send("done")
        # Otherwise the next case would take this answer for its own.
        sources.recv()
        raise
    # The home counts all reads, although its answers may come too late to confirm them, and the reports come again.
    sources.send("done")
    outcomes = sources.recv()
    held.close()
    assert outcomes == ["READ"]
