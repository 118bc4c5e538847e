"""Pairs of engines over verbs: planned reads arrive byte for byte, directly and through staging memory, at once and
step by step, and no other byte is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvferry import Blocks, IntegrityOptions, Read, ReadResult, serve
from tests.support import pairwise
from tests.support.geometry_cases import GQA, Case
from tests.support.held_ranks import HeldRanks, allocate, document, little_staging
from tests.support.loaded_processes import LOADED
from tests.support.waiting import until

TRANSPORTS = {"rc": "rc_verbs,ud_verbs", "ud": "ud_verbs,self"}
"""By UCX's names, and no others: `rc` connects by `ud`, and `self` carries nothing between processes."""

LARGEST_PACKET = 4096
"""Bytes of a packet's payload that no InfiniBand or RoCE port exceeds."""

FULL = IntegrityOptions("full", patience=60)
SIX = {**GQA, "kv_heads": 6}
SOON = 120.0
"""Seconds that a read may take in an emulated machine, which needs three."""

PAIRS = {
    "1-to-1": Case({}, {}, path="direct"),
    "1-to-1-staged": Case({"layout": "NHD"}, {"block_size": 32}, held=21, path="staged"),
    "4-to-2": Case({"tp_size": 4}, {"tp_size": 2, "layout": "NHD"}, path="direct"),
    "4-to-2-staged": Case({"tp_size": 4, "layout": "NHD"}, {"tp_size": 2, "kv": "packed"}, path="staged"),
    "2-to-3": Case(
        {"tp_size": 2, "model": SIX}, {"tp_size": 3, "model": SIX, "block_size": 32}, held=21, path="direct"
    ),
    "2-to-3-staged": Case(
        {"tp_size": 2, "model": SIX, "layout": "NHD"}, {"tp_size": 3, "model": SIX, "block_size": 32}, path="staged"
    ),
}
ROWS = pairwise.rows()
OVER_UD = ("4-to-2", "2-to-3-staged")
"""Pairs that `make test-rdma` moves over `ud` too: UCX differs there, not kvferry."""


@dataclass(frozen=True)
class Step:
    """The blocks that a source publishes at once.

    Attributes:
        blocks: what the publication gains.
        layers: see `EngineSession.publish_more`.
        summed: blocks that are complete now.
        last: no more will follow.
    """

    blocks: Mapping[str, Blocks]
    summed: Mapping[str, Blocks]
    layers: tuple[str, ...] | None = None
    last: bool = False


def hold(pipe: Connection) -> None:
    """The process of the sources, one engine after another, and of the node server that is the home of all engines."""
    with serve() as server:
        pipe.send(server.address)
        while True:
            try:
                transports, engine, blocks = pipe.recv()
            except EOFError:
                return
            # Before the agents are made: they read it.
            os.environ["UCX_TLS"] = transports
            source = HeldRanks(server.address, engine, "", serve=True, integrity=FULL)
            source.fill("request", blocks)
            publication = source.session.publish("request", {}, last=False, checksums=True)
            pipe.send(publication.reference)
            step: Step
            sums: list[Future[int]] = []
            while (step := pipe.recv()) is not None:
                source.session.publish_more(publication, step.blocks, last=step.last, layers=step.layers)
                for cache, _, _ in source.ranks if step.summed else ():
                    sums.append(cache.checksum(publication.number, step.summed, last=step.last))
            assert all(sent.result(SOON) > 0 for sent in sums)
            pipe.send([release.outcome.name for release in source.session.released(timeout=SOON)])
            source.close()


@pytest.fixture(scope="module")
def sources() -> Iterator[tuple[Connection, str]]:
    """A pipe to the process of the sources, and its node server's address."""
    ours, theirs = LOADED.Pipe()
    process = LOADED.Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours, ours.recv()
    ours.close()
    process.join(20)


class Reading:
    """A request that all ranks of a destination read."""

    def __init__(self, pipe: Connection, held: HeldRanks, case: Case, *, progressive: bool) -> None:
        self.pipe, self.held, self.case = pipe, held, case
        self.mine = allocate(held.engine, case.tokens, case.held, 2)
        reference = pipe.recv()
        self.reads: list[Read] = [
            cache.read(
                reference,
                self.mine,
                (case.held, case.tokens),
                read_id="r",
                parties=len(held.ranks),
                progressive=progressive,
            )
            for cache, _, _ in held.ranks
        ]

    def faults(self, tokens: int = 0) -> list[str]:
        """The wrong bytes in the memories, if the tokens up to here should be there; 0: all tokens."""
        return self.held.faults("request", self.mine, tokens or self.case.tokens, self.case.held)

    def results(self) -> list[ReadResult]:
        """Wait for the end; every byte is right."""
        found = [read.result(SOON) for read in self.reads]
        assert self.faults() == []
        return found


@contextmanager
def reading(
    sources: tuple[Connection, str], transports: str, case: Case, *, progressive: bool = False
) -> Iterator[tuple[Reading, dict[str, Blocks]]]:
    """A read that has begun and has nothing to read yet, and the blocks that its source is to publish."""
    pipe, address = sources
    theirs = document(case.source)
    blocks = allocate(theirs, case.tokens, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", transports)
        pipe.send((transports, theirs, blocks))
        mine, staging = document(case.destination), little_staging(case.path)
        held = HeldRanks(address, mine, "", serve=False, staging=staging, integrity=FULL, warm_up_timeout=SOON)
        before = packets()
        try:
            begun = Reading(pipe, held, case, progressive=progressive)
            yield begun, blocks
            moved = sum(read.result(0).bytes for read in begun.reads)
            assert (packets() - before) * LARGEST_PACKET >= moved, "the bytes went another way"
        finally:
            held.close()
            pipe.send(None)
    assert pipe.recv() == ["READ"]


def packets() -> int:
    """Packets that the cards have sent."""
    counters = Path("/sys/class/infiniband").glob("*/ports/*/hw_counters/sent_pkts")
    return sum(int(counter.read_text()) for counter in counters)


def move(sources: tuple[Connection, str], transports: str, case: Case) -> None:
    """One request from one engine to the other, published at once."""
    with reading(sources, transports, case) as (begun, blocks):
        begun.pipe.send(Step(blocks, blocks, last=True))
        results = begun.results()
        assert [r.staged_bytes for r in results] == [r.bytes if case.path == "staged" else 0 for r in results]


def _pairs() -> list[object]:
    return [
        pytest.param(
            transports,
            case,
            id=f"{short}-{name}",
            marks=pytest.mark.slow if short == "ud" and name not in OVER_UD else (),
        )
        for short, transports in TRANSPORTS.items()
        for name, case in PAIRS.items()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transports", "case"), _pairs())
def test_a_pair_is_moved_exactly(sources: tuple[Connection, str], transports: str, case: Case) -> None:
    move(sources, transports, case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row.values()).replace(" ", "_") for row in ROWS])
@pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_a_pair_of_the_cover_is_moved_exactly(
    sources: tuple[Connection, str], transports: str, row: dict[str, Any]
) -> None:
    move(sources, transports, Case(*pairwise.documents(row), *pairwise.tokens(row), path=row["path"]))


def part(blocks: Blocks, begin: int, end: int) -> dict[str, Blocks]:
    """The blocks of 16 tokens that hold these tokens."""
    return {"full": Blocks(blocks.ids[begin // 16 : -(-end // 16)], begin, end)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS.keys())
@pytest.mark.parametrize("by", ["chunks", "layers"])
def test_steps_are_read_as_they_are_published(sources: tuple[Connection, str], transports: str, by: str) -> None:
    case = Case({"tp_size": 2, "model": SIX}, {"tp_size": 3, "model": SIX, "block_size": 32}, path="direct")
    with reading(sources, transports, case, progressive=True) as (begun, blocks):
        pipe, full = begun.pipe, blocks["full"]
        first, more, tail = part(full, 0, 64), part(full, 32, 64), part(full, 64, case.tokens)
        if by == "chunks":
            first = part(full, 0, 32)
            pipe.send(Step(first, first))
            until(lambda: begun.faults(32) == [], SOON)
            pipe.send(Step(more, more))
        else:
            early = ("layers.0", "layers.2")
            missing = [
                f"rank {cache.rank.rank}: {plane.name} is wrong"
                for cache, _, rank in begun.held.ranks
                for plane in rank.planes
                if plane.layer not in early
            ]
            pipe.send(Step(first, {}, layers=early))
            until(lambda: begun.faults(64) == missing, SOON)
            pipe.send(Step({}, first, layers=("layers.1", "layers.3")))
        until(lambda: begun.faults(64) == [], SOON)
        assert not any(read.done() for read in begun.reads)
        pipe.send(Step(tail, tail, last=True))
        # Every sum was compared, and is the sum of the bytes here.
        found = [result.verification for result in begun.results()]
        assert all(one is not None and one.verified > 0 == one.unverified for one in found), found
