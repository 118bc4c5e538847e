"""Requests of prefill whose prefix another engine may have: it is asked, what it has is read into SGLang's own radix
caches on all ranks, and SGLang computes the rest, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from kvferry import Prompt
from kvferry.engine import WorkerOutput
from kvferry.integrations.sglang import loads
from kvferry.integrations.sglang.requests import KvferrySender
from kvferry.testing import Fabric
from tests.integrations.sglang.played import PROMPT, ROOM, PlayedManager
from tests.integrations.sglang.played_radix import PAGE, PAGES, Reader, Source, compute_in_parts, rows

TEXT = [*range(100, 100 + 10 * PAGE)]


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


@pytest.fixture
def source(fabric: Fabric) -> Source:
    """Has the text, and other bytes everywhere."""
    made = Source(fabric)
    made.compute(range(2 * PAGE))
    made.compute(TEXT)
    made.write()
    return made


def check(reader: Reader, source: Source, begin: int, end: int) -> None:
    """Compare what the reader has of the text with what the source has."""
    for at, rank in enumerate(reader.ranks):
        mine, theirs = rank.memory.cached(TEXT), source.memory.cached(TEXT)
        assert len(mine) == end
        heads = slice(at, at + 1) if len(reader.ranks) > 1 else slice(None)
        wanted = rows(source.memory.pools, theirs[begin:end])
        for read, written in zip(rows(rank.memory.pools, mine[begin:]), wanted, strict=True):
            assert torch.equal(read, written[:, heads])
    assert reader.whole


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("own", "asked", "end"),
    [(0, TEXT, 9), (3, [*TEXT, 7], 10), (3, [*TEXT[: 5 * PAGE + 2], 7, 8, 9, 10], 5), (0, [*TEXT, *range(50)], 10)],
)
def test_what_the_own_cache_lacks_is_read_into_it(
    fabric: Fabric, source: Source, ranks: int, own: int, asked: list[int], end: int
) -> None:
    """All but the last token, which SGLang computes in any case."""
    reader = Reader(fabric, ranks)
    reader.compute(TEXT[: own * PAGE])
    number = reader.want(asked, source.port.engine_reference)
    assert number
    assert all(loads.waits(number) and loads.holding for loads in reader.loads)
    reader.finish(number, source)
    assert not any(loads.holding for loads in reader.loads)
    check(reader, source, own * PAGE, end * PAGE)
    source.idle()
    # The next request finds all of it.
    assert reader.want(asked, source.port.engine_reference) == 0 or end < (len(asked) - 1) // PAGE


def test_own_prefix_is_kept_while_the_rest_is_read(fabric: Fabric, source: Source) -> None:
    reader = Reader(fabric)
    reader.compute(TEXT[: 3 * PAGE])
    number = reader.want(TEXT, source.port.engine_reference)
    with fabric.hold_reads() as reads:
        source.loop_until(lambda: (reader.loop(), reads.count)[1])
        reader.ranks[0].memory.evict(PAGES * PAGE)
        assert reader.ranks[0].memory.free == (PAGES - 9) * PAGE
    reader.finish(number, source)
    check(reader, source, 3 * PAGE, 9 * PAGE)


def test_what_has_come_into_the_cache_meanwhile_stays(fabric: Fabric, source: Source) -> None:
    reader = Reader(fabric)
    number = reader.want(TEXT, source.port.engine_reference)
    with fabric.hold_reads() as reads:
        source.loop_until(lambda: (reader.loop(), reads.count)[1])
        reader.compute(TEXT[: 4 * PAGE])
        before = reader.ranks[0].memory.cached(TEXT)
    reader.finish(number, source)
    assert torch.equal(reader.ranks[0].memory.cached(TEXT)[: 4 * PAGE], before)
    assert len(reader.ranks[0].memory.cached(TEXT)) == 9 * PAGE
    assert reader.whole


@pytest.mark.parametrize("named", ["other text", "itself", "no reference", "dead"])
def test_request_is_computed_if_there_is_nothing_to_read(fabric: Fabric, source: Source, named: str) -> None:
    reader = Reader(fabric, 2)
    text = [7, *TEXT] if named == "other text" else TEXT
    reference = {"itself": reader.port.engine_reference, "no reference": "kvf1"}.get(
        named, source.port.engine_reference
    )
    if named == "dead":
        fabric.kill(source.client)
    number = reader.want(text, reference)
    assert number
    reader.finish(number, *([] if named == "dead" else [source]))
    assert reader.whole
    assert not any(len(rank.memory.cached(text)) for rank in reader.ranks)


def test_bytes_of_a_failed_read_do_not_get_into_the_cache(fabric: Fabric, source: Source) -> None:
    """Its pages are taken again when nothing writes to them any more."""
    reader = Reader(fabric, 2)
    fabric.fail_reads()
    number = reader.want(TEXT, source.port.engine_reference)
    reader.finish(number, source)
    assert reader.whole
    assert not any(len(rank.memory.cached(TEXT)) for rank in reader.ranks)
    again = reader.want(TEXT, source.port.engine_reference)
    reader.finish(again, source)
    check(reader, source, 0, 9 * PAGE)


def test_request_does_not_wait_until_its_pages_are_quiet(fabric: Fabric, source: Source) -> None:
    """That may take a minute after the read's end."""
    reader = Reader(fabric, 2)
    silent = reader.ranks[1].manager.worker
    silent.finished, finished = (lambda: WorkerOutput(1)), silent.finished
    number = reader.want(TEXT, source.port.engine_reference)
    with fabric.hold_reads() as reads:
        source.loop_until(lambda: (reader.loop(), reads.count)[1])
        fabric.advance(loads.MOST_TIME + 11)
        reader.finish(number, source)
        assert [(each.holding, rank.memory.free) for each, rank in zip(reader.loads, reader.ranks, strict=True)] == [
            (True, (PAGES - 9) * PAGE)
        ] * 2
    silent.finished = finished
    source.loop_until(lambda: (reader.loop(), not any(each.holding for each in reader.loads))[1])
    assert reader.whole
    assert not any(len(rank.memory.cached(TEXT)) for rank in reader.ranks)


@pytest.mark.parametrize(("chunked", "read"), [(0, True), (PAGES - 11, True), (PAGES - 9, False)])
def test_room_that_a_prompt_in_parts_needs_is_not_taken(
    fabric: Fabric, source: Source, chunked: int, read: bool
) -> None:
    reader = Reader(fabric, 2)
    compute_in_parts(reader.ranks, chunked)
    number = reader.want(TEXT, source.port.engine_reference)
    reader.finish(number, source)
    assert [len(rank.memory.cached(TEXT)) for rank in reader.ranks] == [9 * PAGE if read else 0] * 2
    assert reader.whole
    source.idle()


@pytest.mark.parametrize(("chunked", "asked"), [(PAGES - 9, True), (PAGES - 8, False)])
def test_own_prefix_is_not_kept_from_a_prompt_in_parts(
    fabric: Fabric, source: Source, chunked: int, asked: bool
) -> None:
    reader = Reader(fabric, 2)
    reader.compute(TEXT[: 8 * PAGE])
    compute_in_parts(reader.ranks, chunked)
    assert bool(reader.want(TEXT, source.port.engine_reference)) == asked
    for rank in reader.ranks:
        rank.memory.compute_part(chunked)


def test_others_are_evicted_for_what_is_read(fabric: Fabric, source: Source) -> None:
    reader = Reader(fabric, 2)
    for seed in range(4):
        reader.compute(range(1000 * seed, 1000 * seed + 8 * PAGE))
    assert reader.ranks[0].memory.free == 0
    number = reader.want(TEXT, source.port.engine_reference)
    reader.finish(number, source)
    check(reader, source, 0, 9 * PAGE)


def test_read_begins_when_the_batches_are_computed_that_were_under_way(fabric: Fabric, source: Source) -> None:
    """They may still write to pages that SGLang has freed since."""
    reader = Reader(fabric)
    computing = reader.ranks[0].scheduler.result_queue
    computing.append((None, "first"))
    number = reader.want(TEXT, source.port.engine_reference)
    with fabric.hold_reads() as reads:
        source.loop_until(lambda: (reader.loop(), reader.loads[0]._computing)[1])
        for _ in range(3):
            assert reader.loop() is None
        assert reads.count == 0
        computing.clear()
        source.loop_until(lambda: (reader.loop(), reads.count)[1])
    reader.finish(number, source)
    check(reader, source, 0, 9 * PAGE)


@pytest.mark.parametrize(
    "changed",
    [
        {"source": None},
        {"source": ""},
        {"source": 7},
        {"cache_salt": "salt"},
        {"extra_key": "tenant"},
        {"extra_key": "tenant adapter", "lora_id": "adapter"},
        {"prompt": Prompt.unknown},
        {"tokens": TEXT[:PAGE]},
    ],
)
def test_nobody_is_asked_for_other_requests(fabric: Fabric, source: Source, changed: dict[str, Any]) -> None:
    reader = Reader(fabric)
    given = {"tokens": TEXT, "source": source.port.engine_reference, **changed}
    assert reader.want(given.pop("tokens"), given.pop("source"), **given) == 0
    assert not reader.loads[0].holding
    assert reader.whole


def test_number_of_loads_is_bounded(fabric: Fabric, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MOST_LOADS", 1)
    reader = Reader(fabric)
    first = reader.want(TEXT, source.port.engine_reference)
    assert first
    assert reader.want([5, *TEXT], source.port.engine_reference) == 0
    reader.finish(first, source)


@pytest.mark.parametrize("leader", [True, False])
def test_request_waits_for_its_prefix_in_the_bootstrap_queue(leader: bool) -> None:
    manager = PlayedManager(leader=leader)
    waiting = {3}
    manager.loads = SimpleNamespace(waits=waiting.__contains__)
    sender, plain = (KvferrySender(manager, "127.0.0.1:8998", room) for room in (ROOM, ROOM + 1))
    sender.expect_prompt("r", PROMPT, 3)
    plain.expect_prompt("s", PROMPT, 0)
    assert (sender.poll(), plain.poll()) == (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    waiting.clear()
    assert sender.poll() == KVPoll.WaitingForInput


def test_request_that_fails_does_not_wait_for_its_prefix() -> None:
    manager = PlayedManager()
    manager.loads = SimpleNamespace(waits=lambda number: True)
    sender = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    sender.expect_prompt("r", PROMPT, 3)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
