"""Short pieces go through staging memory on the cache's own device, and are permuted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry import KvferryError
from tests.gpu.device_engines import DeviceEngine
from tests.gpu.rank_process import Settings
from tests.gpu.torch_caches import Shape, Written

SHAPE = Shape()
THERE = Written(seed=3, ids=(3, 4, 5, 17, 9), end=71)
HERE = replace(THERE, ids=(20, 2, 3, 4, 11))
STAGED = Settings(staging={"path": "staged"})
Make = Callable[..., DeviceEngine]


def staged(source: DeviceEngine, destination: DeviceEngine, there: Written = THERE, here: Written = HERE) -> int:
    """Move a request, and compare every byte; how many went through staging memory."""
    results = destination.read(source.publish(there), here)
    assert destination.wrong(here) == []
    return sum(result.staged_bytes for result in results)


@pytest.mark.parametrize(
    ("ranks", "layouts", "sizes"),
    [
        pytest.param((1, 2), ("tokens first", "tokens first"), (16, 16), id="some of the heads of each token"),
        pytest.param((1, 1), ("tokens first", "heads first"), (16, 16), id="tokens first to heads first"),
        pytest.param((1, 1), ("heads first", "one storage"), (16, 16), id="heads first to one storage"),
        pytest.param((2, 3), ("one storage", "blocks first"), (16, 32), id="ranks, layout and block size"),
        pytest.param((2, 1), ("heads first", "tokens first"), (32, 16), id="smaller blocks"),
    ],
)
def test_staged_bytes_arrive(
    engine: Make, device: str, ranks: tuple[int, int], layouts: tuple[str, str], sizes: tuple[int, int]
) -> None:
    source, destination = (
        engine([device] * count, replace(SHAPE, block_tokens=size), layout, settings=STAGED)
        for count, layout, size in zip(ranks, layouts, sizes, strict=True)
    )
    source.ready()
    destination.ready()
    there = replace(THERE, ids=THERE.ids[: -(-THERE.end // sizes[0])])
    here = Written(3, HERE.ids[: -(-THERE.end // sizes[1]) - 16 // sizes[1]], THERE.end, 16)
    assert staged(source, destination, there, here) == (here.end - here.first) * SHAPE.token_bytes


@pytest.mark.parametrize("way", ["host to device", "device to host"])
def test_staging_memory_lies_with_the_destination(engine: Make, device: str, way: str) -> None:
    source_device, destination_device = (device if of == "device" else "cpu" for of in way.split(" to "))
    source = engine([source_device], SHAPE, "tokens first", settings=STAGED)
    destination = engine([destination_device], SHAPE, settings=STAGED)
    assert staged(source.ready(), destination.ready()) == THERE.end * SHAPE.token_bytes


def test_a_read_larger_than_all_slots_is_staged_in_turns(engine: Make, device: str) -> None:
    shape = replace(SHAPE, layers=4, num_blocks=80)
    settings = Settings(staging={"path": "staged", "slot_bytes": 64 << 10, "slots": 2})
    source = engine([device], shape, "tokens first", settings=settings)
    destination = engine([device], shape, settings=settings)
    there = Written(4, tuple(range(70)), 70 * 16)
    assert staged(source.ready(), destination.ready(), there, replace(there, ids=tuple(range(79, 9, -1)))) > 128 << 10


def test_costs_of_this_machine_are_measured_and_a_path_is_chosen(engine: Make, device: str) -> None:
    """Pieces of 64 B of each token: the measurement decides whether they are staged."""
    source, destination = engine([device], SHAPE, "tokens first"), engine([device] * 2, SHAPE, "tokens first")
    source.ready()
    destination.ready()
    for seed in range(3):
        staged(source, destination, replace(THERE, seed=seed), replace(HERE, seed=seed))


def test_a_graph_is_captured_while_a_read_is_staged(engine: Make, device: str) -> None:
    """An engine may capture CUDA graphs at any time; nothing that a read does on its threads may break a capture."""
    shape = replace(SHAPE, layers=4, num_blocks=80)
    source = engine([device], shape, "tokens first")
    destination = engine([device], shape, settings=Settings(staging={"path": "staged", "slot_bytes": 64 << 10}))
    source.ready()
    destination.ready()
    for seed in range(5):
        there = Written(seed, tuple(range(70)), 70 * 16)
        destination.begin(source.publish(there), there, "begin")
        destination.answers()
        assert destination.all("capture_while_reading") >= [1]
        assert destination.all("ended") == [""]
        assert destination.wrong(there) == []


def test_a_device_without_memory_for_staging_fails_one_read_at_most(engine: Make, cuda: str) -> None:
    """The read is quiet, and the next one, when there is memory, works."""
    source, destination = engine([cuda], SHAPE, "tokens first"), engine([cuda], SHAPE, settings=STAGED)
    source.ready()
    destination.ready()
    destination.all("limit_memory", 0)
    try:
        staged(source, destination)
    except KvferryError:
        assert destination.all("quiet") == [True]
    destination.all("limit_memory", -1)
    destination.all("poison")
    there, here = replace(THERE, seed=6), replace(HERE, seed=6)
    staged(source, destination, there, here)
