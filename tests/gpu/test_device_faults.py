"""A read that is cancelled, or whose source dies, becomes quiet, and harms no other read."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvferry import errors
from tests.gpu.device_engines import DeviceEngine
from tests.gpu.rank_process import RankProcess, Settings
from tests.gpu.torch_caches import Shape, Written
from tests.support.waiting import stop

SHAPE = Shape(num_blocks=200, head_dim=128)
ALL = Written(seed=1, ids=tuple(range(200)), end=200 * 16)
FEW = Written(seed=2, ids=(7, 3), end=32)
SMALL_CHUNKS = {"chunk_bytes": 64 << 10, "bytes_in_flight": 64 << 10}
Make = Callable[..., DeviceEngine]


@contextmanager
def stopped(process: RankProcess) -> Iterator[None]:
    """The process does nothing. Over TCP nothing can be read from it meanwhile."""
    stop(process.pid)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def connected(make: Make, device: str, environment: Mapping[str, str], **nixl: object) -> list[DeviceEngine]:
    """A source and a destination that have read from each other before."""
    source = make([device], SHAPE, environment=environment)
    destination = make([device], SHAPE, environment=environment, settings=Settings({**SMALL_CHUNKS, **nixl}))
    source.ready()
    destination.ready()
    still_works(source, destination)
    return [source, destination]


def still_works(source: DeviceEngine, destination: DeviceEngine) -> None:
    """A request moves."""
    destination.all("poison")
    destination.read(source.publish(FEW), FEW)
    assert destination.wrong(FEW) == []


def test_a_read_can_be_cancelled_while_its_source_hangs(
    engine: Make, device: str, transports: Mapping[str, Mapping[str, str]]
) -> None:
    """It is not quiet before the source goes on; afterwards nothing writes to its blocks any more."""
    source, destination = connected(engine, device, transports["tcp"])
    publication = source.publish(ALL)
    (reader,) = destination.ranks
    with stopped(source.ranks[0]):
        destination.begin(publication, ALL, "begin")
        destination.answers()
        reader.call("wait_posted")
        assert reader.call("cancel") is False
        assert reader.call("ended") == "TransferCancelled"
        assert reader.call("quiet", 0.0) is False
    assert reader.call("quiet") is True
    still_works(source, destination)


def test_a_read_can_be_cancelled_while_bytes_arrive(engine: Make, device: str) -> None:
    """At any point of the read: once it is quiet, its blocks may be another request's."""
    source, destination = connected(engine, device, {})
    for seed in range(5):
        destination.begin(source.publish(replace(ALL, seed=seed)), ALL, "begin")
        destination.answers()
        (reader,) = destination.ranks
        reader.call("wait_posted")
        reader.call("cancel")
        assert reader.call("ended") in ("", "TransferCancelled")
        assert reader.call("quiet") is True
        still_works(source, destination)


@pytest.mark.parametrize("transport", ["as UCX chooses", "tcp"])
def test_a_source_is_killed_during_a_read(
    engine: Make, device: str, transports: Mapping[str, Mapping[str, str]], transport: str
) -> None:
    """The read fails, or had ended before; it is quiet in bounded time, and other sources can be read."""
    environment = transports[transport]
    source, destination = connected(engine, device, environment, fence_time=1.0)
    publication = source.publish(ALL)
    (reader,) = destination.ranks
    if transport == "tcp":
        stop(source.ranks[0].pid)
    destination.begin(publication, ALL, "begin")
    destination.answers()
    reader.call("wait_posted")
    source.ranks[0].process.kill()
    ended = reader.call("ended", 50.0)
    if ended:
        assert issubclass(getattr(errors, ended), errors.KvferryError)
    else:
        assert transport != "tcp"
        assert destination.wrong(ALL) == []
    assert reader.call("quiet") is True
    another = engine([device], SHAPE, environment=environment)
    still_works(another.ready(), destination)


def test_a_reader_is_killed_during_a_read(engine: Make, device: str) -> None:
    """Its source goes on serving others, and gets its blocks back."""
    source, destination = connected(engine, device, {})
    publication = source.publish(ALL)
    destination.begin(publication, ALL, "begin")
    destination.answers()
    (reader,) = destination.ranks
    reader.call("wait_posted")
    reader.process.kill()
    another = engine([device], SHAPE)
    still_works(source, another.ready())


def test_memory_is_given_back(engine: Make, device: str) -> None:
    """Registered, read into by way of staging memory, and closed, again and again: no more memory is in use after the
    seventh time than after the third, but for less than half of a cache."""
    shape = Shape(layers=4, head_dim=128, num_blocks=400)
    size = shape.num_blocks * shape.block_tokens * shape.token_bytes
    source = engine([device], SHAPE)
    source.ready()
    environment = {"KVFERRY_TEST_PROCESS": "memory"}
    used = []
    for seed in range(7):
        there = engine([device], shape, "tokens first")
        here = engine([device], shape, environment=environment, settings=Settings(staging={"path": "staged"}))
        there.ready()
        here.ready()
        written = replace(ALL, seed=seed)
        here.read(there.publish(written), written)
        (reader,) = here.ranks
        reader.call("unregister")
        there.all("unregister")
        used.append(reader.call("used_memory"))
        for made in (here, there):
            made.close()
    assert max(used[3:]) - used[2] < size // 2, used
