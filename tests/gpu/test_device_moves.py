"""Bytes arrive on a device as the source has them, for every pair of memories and layouts; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

import kvferry
from tests.gpu.device_engines import DeviceEngine
from tests.gpu.rank_process import Settings
from tests.gpu.torch_caches import LAYOUTS, Shape, Written

SHAPE = Shape()
THERE = Written(seed=1, ids=(3, 4, 5, 17, 9), end=71)
HERE = replace(THERE, ids=(20, 2, 3, 4, 11))
Make = Callable[..., DeviceEngine]


def _to(pair: tuple[int, int]) -> str:
    return f"{pair[0]} to {pair[1]}"


def moved(source: DeviceEngine, destination: DeviceEngine, there: Written = THERE, here: Written = HERE) -> None:
    """Move a request; every byte of the destination's ranks is compared."""
    publication = source.publish(there)
    results = destination.read(publication, here)
    assert destination.wrong(here) == []
    assert sum(result.bytes for result in results) == (here.end - here.first) * source.shape.token_bytes
    assert source.released(publication)


@pytest.mark.parametrize("way", ["device to device", "host to device", "device to host"])
@pytest.mark.parametrize("transport", ["as UCX chooses", "same host", "tcp"])
def test_a_request_moves(
    engine: Make, device: str, transports: Mapping[str, Mapping[str, str]], transport: str, way: str
) -> None:
    source_device, destination_device = (device if of == "device" else "cpu" for of in way.split(" to "))
    environment = transports[transport]
    source = engine([source_device], SHAPE, environment=environment)
    destination = engine([destination_device], SHAPE, environment=environment)
    moved(source.ready(), destination.ready())


@pytest.mark.parametrize("transport", ["same host", "tcp"])
def test_ucx_uses_the_configured_transport(
    engine: Make, device: str, transports: Mapping[str, Mapping[str, str]], transport: str
) -> None:
    """By UCX's own log (UCX_PROTO_INFO): between two processes on one card the bytes move by cuda_ipc, on one host
    by cma."""
    environment = {**transports[transport], "UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
    source, destination = (engine([device], SHAPE, environment=environment) for _ in range(2))
    moved(source.ready(), destination.ready())
    near = "cma/" if device == "cpu" else "cuda_ipc/"
    log = destination.log()
    assert "tcp/" in log
    assert (near in log) == (transport == "same host"), log


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 3), (3, 2)], ids=_to)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_sizes_may_differ(engine: Make, device: str, ranks: tuple[int, int], layout: str) -> None:
    """Several ranks on one card, into each layout from another one."""
    names = list(LAYOUTS)
    source = engine([device] * ranks[0], SHAPE, names[names.index(layout) - 1])
    destination = engine([device] * ranks[1], SHAPE, layout)
    moved(source.ready(), destination.ready())


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48), (48, 32)], ids=_to)
@pytest.mark.parametrize("tokens", [(0, 71), (35, 71), (64, 65)], ids=_to)
def test_block_sizes_may_differ_and_ends_may_be_ragged(
    engine: Make, device: str, sizes: tuple[int, int], tokens: tuple[int, int]
) -> None:
    first, end = tokens
    there, here = sizes
    source = engine([device], replace(SHAPE, block_tokens=there))
    destination = engine([device], replace(SHAPE, block_tokens=here), "tokens first")
    written = Written(2, tuple(range(4, 4 + -(-end // there))), end)
    count = -(-end // here) - first // here
    moved(source.ready(), destination.ready(), written, Written(2, tuple(range(9, 9 + count)), end, first))


def test_bytes_that_arrive_are_seen_by_the_next_kernel(engine: Make, device: str) -> None:
    """Twenty times in a row, read into the same blocks and copied from there on another stream with no wait."""
    source, destination = (engine([device], SHAPE) for _ in range(2))
    source.ready()
    destination.ready()
    for seed in range(20):
        moved(source, destination, replace(THERE, seed=seed), replace(HERE, seed=seed))


def test_tokens_behind_the_last_one_are_cleared_on_the_device(engine: Make, device: str) -> None:
    source = engine([device] * 2, SHAPE)
    destination = engine([device], replace(SHAPE, block_tokens=32), "one storage", by_port=True)
    source.ready()
    destination.ready()
    publication = source.publish(THERE)
    here = Written(1, (6, 2, 15), THERE.end, cleared=True)
    end = destination.read_by_port(publication, here)
    assert end.error is None
    assert end.ranks == 1
    assert destination.wrong(here) == []


def test_a_request_moves_between_two_devices(engine: Make, device: str, second: str) -> None:
    """From one card to the other, and each of two ranks on a card of its own."""
    alone, pair = engine([device], SHAPE), engine([second, device], SHAPE, "tokens first")
    other = engine([second], SHAPE, "one storage")
    for made in (alone, pair, other):
        made.ready()
    moved(alone, pair)
    moved(pair, other)
    other.all("poison")
    moved(alone, other, replace(THERE, seed=5), replace(HERE, seed=5))


def test_a_rank_registers_on_a_thread_of_its_own(engine: Make, device: str) -> None:
    """A new thread has no CUDA context, and UCX takes that of the calling thread."""
    settings = Settings(new_thread=True)
    source, destination = (engine([device], SHAPE, settings=settings) for _ in range(2))
    moved(source.ready(), destination.ready())


def test_a_rank_registers_on_a_thread_with_another_current_device(engine: Make, device: str, second: str) -> None:
    settings = Settings(new_thread=True, current_device=-1 if device == "cpu" else 1)
    source, destination = (engine([device], SHAPE, settings=settings) for _ in range(2))
    moved(source.ready(), destination.ready())


def test_memory_of_expandable_segments_moves_or_is_refused(
    engine: Make, device: str, record_property: Callable[[str, object], None]
) -> None:
    """torch maps such memory in pieces (cuMemMap), which not every UCX can give to another process. Wrong bytes are the
    one thing that must not come of it."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    source, destination = (engine([device], SHAPE, environment=environment) for _ in range(2))
    try:
        moved(source.ready(), destination.ready())
        record_property("found", "it moves")
    except kvferry.KvferryError as error:
        record_property("found", f"it is refused: {error}")
