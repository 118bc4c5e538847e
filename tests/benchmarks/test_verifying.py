"""A benchmark that reads wrong bytes fails; and what is timed is what should be."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.caches import CacheMemory, Layout, WrongBytes, blocks_in_runs
from benchmarks.call_counter import PREFACE, Frames
from benchmarks.measures import Action, interleaved
from benchmarks.raw_nixl import chunks, descriptors

LAYOUT = Layout(layers=1, heads=4, head_dim=16, num_blocks=16)
THEIRS, MINE = np.array([3, 9], np.int32), np.array([12, 1], np.int32)


@pytest.fixture
def source() -> CacheMemory:
    memory = CacheMemory(LAYOUT)
    memory.fill()
    return memory


@pytest.mark.parametrize("heads", [4, 1])
def test_a_read_is_right_only_if_every_word_is(source: CacheMemory, heads: int) -> None:
    memory = CacheMemory(LAYOUT, heads)
    memory.poison(MINE)
    with pytest.raises(WrongBytes):
        memory.check(MINE, THEIRS)
    memory.words[:, MINE] = source.words[:, THEIRS, :heads]
    memory.check(MINE, THEIRS)
    memory.words[1, 12, heads - 1, -1] += np.uint64(1)
    with pytest.raises(WrongBytes, match="block 12, which should hold block 3"):
        memory.check(MINE, THEIRS)


def test_blocks_that_changed_places_are_wrong(source: CacheMemory) -> None:
    memory = CacheMemory(LAYOUT)
    memory.words[:, MINE] = source.words[:, THEIRS[::-1]]
    with pytest.raises(WrongBytes):
        memory.check(MINE, THEIRS)


@pytest.mark.parametrize("heads", [4, 2])
def test_raw_descriptors_copy_a_request(source: CacheMemory, heads: int) -> None:
    memory = CacheMemory(LAYOUT, heads)
    theirs, mine = blocks_in_runs(LAYOUT, 4, 2, 1), blocks_in_runs(LAYOUT, 4, 2, 2)
    memory.poison(mine)
    there, here = descriptors(LAYOUT, source.region.base, memory, theirs, mine)
    assert len(there) == 2 * (2 if heads == 4 else 4)
    left, right = source.words.reshape(-1).view(np.uint8), memory.words.reshape(-1).view(np.uint8)
    for (read, size, _), (written, same, _) in zip(there.tolist(), here.tolist(), strict=True):
        assert size == same
        begin, end = read - source.region.base, written - memory.region.base
        right[end : end + size] = left[begin : begin + size]
    memory.check(mine, theirs)


def test_chunks_cover_a_list_once() -> None:
    rows = np.array([[0, size, 0] for size in (5, 5, 30, 1, 9, 1)], np.uint64)
    assert [(part.start, part.stop) for part in chunks(rows, 10)] == [(0, 2), (2, 3), (3, 5), (5, 6)]


@pytest.mark.parametrize("run", [1, 2, 4])
def test_runs_of_blocks_are_distinct_and_of_the_given_length(run: int) -> None:
    ids = blocks_in_runs(LAYOUT, 8, run, 1)
    assert len(set(ids.tolist())) == 8
    assert (np.diff(ids.reshape(-1, run), axis=1) == 1).all()


def test_action_without_its_result_ends_the_run() -> None:
    said: list[str] = []

    def wrong() -> None:
        raise WrongBytes("poison")

    action = Action(lambda: said.append("run"), prepare=lambda: said.append("prepare"), verify=wrong)
    with pytest.raises(WrongBytes):
        interleaved({"read": action}, 3)
    assert said == ["prepare", "run"]


def test_warm_rounds_are_not_measured_and_actions_take_turns() -> None:
    said: list[str] = []
    actions = {name: Action(lambda name=name: said.append(name)) for name in "ab"}  # type: ignore[misc]
    times = interleaved(actions, 2, warm=1)
    # Every second round in the opposite order.
    assert said == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}


def frame(kind: int, length: int) -> bytes:
    return length.to_bytes(3, "big") + bytes([kind]) + bytes(5) + bytes([1]) * length


@pytest.mark.parametrize("piece", [1, 2, 9, 10_000])
def test_calls_are_counted_for_any_fragmentation_of_their_bytes(piece: int) -> None:
    sent = PREFACE + frame(4, 0) + frame(1, 40) + frame(0, 300) + frame(1, 0) + frame(8, 4) + frame(1, 7)
    frames = Frames()
    assert sum(frames.feed(sent[at : at + piece]) for at in range(0, len(sent), piece)) == 3


def test_bytes_of_other_protocols_than_http2_are_not_counted() -> None:
    with pytest.raises(ValueError, match="HTTP/2"):
        Frames().feed(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
