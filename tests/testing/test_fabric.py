"""A fabric carries what engines do: real reads by real clients, without NIXL and without a node server."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvferry import (
    AsyncClient,
    Blocks,
    Client,
    EngineSpec,
    Group,
    IntegrityOptions,
    MemoryKind,
    MemoryRegion,
    StagingOptions,
)
from kvferry.engine import SchedulerPort
from kvferry.errors import Closed, Incompatible, InvalidField, NixlError
from kvferry.testing import Fabric
from tests.support.waiting import without_waits
from tests.testing.fabric_engines import AXES, BLOCKS, HEADS, SOON, Engine, kv

RATIOS = [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize("path", ["auto", "staged"])
@pytest.mark.parametrize("layout", AXES)
@pytest.mark.parametrize(("source", "destination"), RATIOS)
def test_every_byte_arrives_whatever_the_ratio(
    fabric: Fabric, source: int, destination: int, layout: str, path: Literal["auto", "staged"]
) -> None:
    prefill = Engine(fabric, "p", source, layout)
    decode = Engine(fabric, "d", destination, layout, staging=StagingOptions(path))
    values, theirs, mine = kv(tokens=18), [7, 8, 3, 30, 0], [21, 5, 6, 7, 29]
    publication = prefill.publish(values, theirs)
    results = [read.result(SOON) for read in decode.read(publication.reference, mine)]
    assert decode.holds(values, mine)
    assert sum(result.bytes for result in results) == values.nbytes
    assert any(result.staged_bytes for result in results) == (path == "staged")
    assert prefill.outcome(publication).name == "READ"


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_small_pieces_move_either_way(fabric: Fabric, path: str) -> None:
    prefill, decode = Engine(fabric, "p", 2, "nhd"), Engine(fabric, "d", 1, "hnd")
    assert prefill.layout != decode.layout
    values = kv(tokens=64)
    staging = StagingOptions(path)  # type: ignore[arg-type]
    client = fabric.client(staging=staging)
    memory = np.zeros((2, BLOCKS, 4, HEADS, 8), np.uint16)
    spec = EngineSpec("other", (Group("full", block_tokens=4, num_blocks=BLOCKS),))
    cache = client.register_cache(
        spec, tensors={"layer0": memory}, axes=AXES["nhd"], heads=range(HEADS), total_heads=HEADS
    )
    publication = prefill.publish(values, range(16))
    result = cache.read(publication.reference, {"full": Blocks(range(16))}).result(SOON)
    assert (result.staged_bytes > 0) == (path == "staged")
    assert np.array_equal(memory[:, :16].reshape(2, 64, HEADS, 8), values[0])


def test_bytes_arrive_later_and_in_steps(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    values = kv(tokens=10)
    prefill.write(values, [1, 2, 3])
    publication = prefill.session.publish("request", {"full": Blocks([1, 2], end_token=8)}, last=False)
    (read,) = decode.read(publication.reference, [4, 5, 6])
    with pytest.raises(TimeoutError):
        read.result(0.05)
    prefill.session.publish_more(publication, {"full": Blocks([3], first_token=8, end_token=10)}, last=True)
    read.result(SOON)
    assert decode.holds(values, [4, 5, 6])


def test_a_read_may_come_before_its_publication(fabric: Fabric) -> None:
    decode, client = Engine(fabric, "d"), fabric.client()
    spec = EngineSpec("p", (Group("full", block_tokens=4, num_blocks=BLOCKS),))
    port, values = SchedulerPort(client, spec), kv(tokens=4)
    memory = {f"layer{layer}": values[layer].swapaxes(1, 2)[:, None].copy() for layer in range(2)}
    padded = {name: np.concatenate([block] * BLOCKS, axis=1) for name, block in memory.items()}
    client.register_cache(spec, tensors=padded, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS)
    fabric.stop_home()
    # Successful at once; the home gets the report when it is back.
    publication = port.publish("request", {"full": Blocks([1])})
    (read,) = decode.read(publication.reference, [2])
    with pytest.raises(TimeoutError):
        read.result(0.05)
    fabric.start_home()
    read.result(SOON)
    assert decode.holds(values, [2])
    port.close()


def test_errors_of_the_home_come_with_their_values(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p", model="a"), Engine(fabric, "d", model="b")
    (read,) = decode.read(prefill.publish(kv(4), [1]).reference, [2])
    error = read.exception(SOON)
    assert isinstance(error, Incompatible)
    assert [(found.field, found.source, found.destination) for found in error.mismatches] == [("model", "a", "b")]


def test_integrity_mode_compares_what_was_read(fabric: Fabric) -> None:
    sums = IntegrityOptions("full")
    spec = [EngineSpec(name, (Group("full", block_tokens=4, num_blocks=8),)) for name in ("p", "d")]
    memory = [np.full((2, 8, 1, 4, 8), value, np.uint16) for value in (7, 0)]
    prefill, decode = (
        fabric.client(integrity=sums).register_cache(spec[place], tensors={"layer0": memory[place]}, axes=AXES["hnd"])
        for place in range(2)
    )
    blocks = {"full": Blocks([1, 2], end_token=8)}
    publication = prefill.session.publish("request", blocks, checksums=True)
    assert prefill.checksum(publication.number, blocks).result(SOON) > 0
    result = decode.read(publication.reference, {"full": Blocks([3, 4])}).result(SOON)
    assert result.verification is not None
    assert (result.verification.verified, result.verification.unverified) == (4, 0)


async def test_the_client_for_asyncio_works_as_well(fabric: Fabric) -> None:
    prefill = await asyncio.to_thread(Engine, fabric, "p")
    values = kv(tokens=4)
    publication = await asyncio.to_thread(prefill.publish, values, [1])
    memory = np.zeros((2, BLOCKS, HEADS, 4, 8), np.uint16)
    async with AsyncClient(fabric.address) as client:
        spec = EngineSpec("d", (Group("full", block_tokens=4, num_blocks=BLOCKS),))
        cache = await client.register_cache(
            spec, tensors={"layer0": memory}, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS
        )
        await cache.read(publication.reference, {"full": Blocks([2])})
    assert np.array_equal(memory[:, 2].swapaxes(1, 2), values[0])


def test_costs_of_reads_are_not_measured(fabric: Fabric) -> None:
    # Of pieces this small, in caches this large, NIXL reads some before the first read, and their time decides on the
    # path.
    prefill, decode = (Engine(fabric, name, ranks, "nhd", blocks=8192) for name, ranks in (("p", 1), ("d", 2)))
    reads = decode.read(prefill.publish(kv(tokens=64), range(16)).reference, range(16))
    for read, cache in zip(reads, decode.caches, strict=True):
        # Rows that are read whole hold the heads of both ranks.
        result = read.result(SOON)
        assert cache.gauges().bytes_moved <= 2 * result.bytes


def test_memory_of_a_device_is_refused(fabric: Fabric) -> None:
    described = Engine(fabric, "described").caches[0].rank.planes
    planes = [replace(plane, memory_kind=MemoryKind.VRAM) for plane in described]
    first, last = min(plane.base for plane in planes), max(plane.base for plane in planes)
    regions = [MemoryRegion(MemoryKind.VRAM, 0, first, last - first + planes[0].block_stride * BLOCKS)]
    spec = EngineSpec("p", (Group("full", block_tokens=4, num_blocks=BLOCKS),))
    with pytest.raises(NixlError, match="host memory only"):
        fabric.client().register_cache(spec, planes=planes, regions=regions)


def test_a_closed_fabric_ends_all_its_clients() -> None:
    before = set(threading.enumerate())
    with Fabric() as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        for read in decode.read(prefill.publish(kv(4), [1]).reference, [2]):
            read.result(SOON)
        mine = Client(fabric.address)
    with pytest.raises(Closed):
        prefill.session.publish("late", {"full": Blocks([3])})
    with pytest.raises(Closed):
        fabric.client()
    with pytest.raises(InvalidField, match="a Fabric that is open in this process"):
        Client(fabric.address)
    fabric.close()
    mine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON)
    assert set(threading.enumerate()) <= before


def test_a_fabric_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        with Fabric() as fabric:
            prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
            [read] = decode.read(prefill.publish(kv(4), [1]).reference, [2])
            read.result(SOON)
        assert not {thread.name for thread in set(threading.enumerate()) - before}


def test_two_fabrics_are_separate() -> None:
    with Fabric() as one, Fabric() as other:
        assert one.address != other.address
        Engine(one, "p")
        Engine(other, "p")


def test_a_client_of_a_fabric_is_made_as_in_production() -> None:
    production, on_fabric = (inspect.signature(function).parameters for function in (Client, Fabric.client))
    shared = on_fabric.keys() & production.keys()
    assert {"prompt_check", "optimistic", "staging"} < shared
    assert {name: on_fabric[name].default for name in shared} == {name: production[name].default for name in shared}


def test_durations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidField, match="at most max_ttl"):
        Fabric(ttl=31.0)


def test_the_fabric_needs_neither_nixl_nor_the_extra_nor_a_connection() -> None:
    code = """
import sys
for name in ("nixl", "torch", "uvloop", "pydantic", "grpc_health", "grpc_reflection"):
    sys.modules[name] = None

def watch(event, arguments):
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork"):
        raise AssertionError(f"{event}{arguments}")

sys.addaudithook(watch)
import grpc

def dialled(*_, **__):
    raise AssertionError("a channel was made")

grpc.insecure_channel = grpc.secure_channel = grpc.server = dialled
import psutil
from kvferry.testing import Fabric
from tests.testing.fabric_engines import Engine, kv

with Fabric() as fabric:
    prefill, decode = Engine(fabric, "p", 2), Engine(fabric, "d", 3)
    values = kv(18)
    publication = prefill.publish(values, [1, 2, 3, 4, 5])
    for read in decode.read(publication.reference, [9, 8, 7, 6, 5]):
        read.result(20)
    print(decode.holds(values, [9, 8, 7, 6, 5]), prefill.outcome(publication).name)
    print(psutil.Process().net_connections("inet"), [name for name in sys.modules if "nixl" in name.split(".")[0]])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60, check=False
    )
    assert (done.stdout.splitlines(), without_waits(done.stderr)) == (["True READ", "[] ['nixl']"], "")


def test_importing_kvferry_does_not_import_the_server() -> None:
    code = "import kvferry, sys; print([name for name in sys.modules if name.startswith('kvferry_server')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
