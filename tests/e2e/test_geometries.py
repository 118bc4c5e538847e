"""Geometries of every kind over real NIXL: one process holds all ranks of the source, the test the destination's."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from examples.demo import POISON
from kvferry.errors import Incompatible
from tests.support import pairwise
from tests.support.geometry_cases import CASES, GQA, Case
from tests.support.held_ranks import HeldRanks, allocate, document, hold_sources, little_staging, move
from tests.support.loaded_processes import LOADED


@pytest.fixture(scope="module")
def sources(homes: tuple[str, str]) -> Iterator[Connection]:
    ours, theirs = LOADED.Pipe()
    process = LOADED.Process(target=hold_sources, args=(homes[0], theirs), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join(20)


ROWS = pairwise.rows()
COVER = [Case(*pairwise.documents(row), *pairwise.tokens(row), path=row["path"]) for row in ROWS]


@pytest.mark.parametrize("case", COVER, ids=[" ".join(row.values()).replace(" ", "_") for row in ROWS])
def test_pair_of_the_cover_is_moved_exactly(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    move(sources, homes, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pair_of_geometries_is_moved_exactly(sources: Connection, homes: tuple[str, str], case: Case) -> None:
    move(sources, homes, case)


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        (
            {"format": "opaque", "granule": 16, "units_divide": False},
            {"format": "opaque", "granule": 32, "units_divide": False, "block_size": 32},
            "granule",
        ),
        ({"model": {**GQA, "dtype": "float16"}}, {}, "dtype"),
        ({"tp_size": 2, "shards": [[0, 3], [4, 8]], "partial": True}, {}, "units"),
    ],
    ids=["page-opaque-unequal-pages", "dtype", "hole"],
)
def test_pair_that_cannot_be_read_is_refused_at_handshake(
    sources: Connection, homes: tuple[str, str], source: dict[str, Any], destination: dict[str, Any], reason: str
) -> None:
    theirs, mine = document(source), document(destination)
    sources.send((theirs, "request", allocate(theirs, 32, 0, 1), ""))
    held = HeldRanks(homes[1], mine, "", serve=False, staging=little_staging())
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
