"""Whatever a caller changes right after a call returned changes nothing of what the call was for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, MemoryKind, MemoryRegion
from kvferry._cache import runtime_of
from kvferry._control.publish import Publish
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.geometry.tensors import planes_of
from tests.api.conftest import AXES, BLOCKS, TOKENS, Pair, array
from tests.support.identifiers import unique_id
from tests.support.offering import offered


def test_a_row_of_the_block_table_may_be_rewritten_once_a_read_was_started(pair: Pair) -> None:
    """The read waits for its publication, so its blocks are looked at long after the row was rewritten."""
    row = np.array([1, 2, 3], np.int32)
    publication, send = offered(pair.source.session, Publish("request", {"full": Blocks([11, 12, 13])}))
    read = pair.destination.read(publication.reference, {"full": Blocks(row)})
    row[:] = [40, 41, 42]
    send()
    assert read.result(30).bytes == 3 * pair.mine[:, 0].nbytes
    assert [pair.holds(block) for block in (1, 2, 3)] == [11, 12, 13]
    assert [pair.holds(block) for block in (40, 41, 42)] == [10_000] * 3


def test_a_row_may_be_rewritten_at_any_time(pair: Pair) -> None:
    """Blocks takes either what was there before or what was there after, and sticks to it."""
    row = np.array([1, 2, 3], np.int32)
    over = threading.Event()

    def rewrite() -> None:
        while not over.is_set():
            row[:] = [1, 2, 3]
            row[:] = [4, 5, 6]

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(20):
            blocks = Blocks(row)
            wanted = blocks.ids.tolist()
            publication = pair.source.session.publish("request", {"full": Blocks([11, 12, 13])})
            pair.mine[:] = 10_000
            if len(set(wanted)) == 3:
                pair.destination.read(publication.reference, {"full": blocks}).result(30)
                assert [pair.holds(block) for block in wanted] == [11, 12, 13]
                assert sum(pair.holds(block) != 10_000 for block in range(BLOCKS)) == 3
    finally:
        over.set()
        thread.join()


def test_ids_are_copied_and_stay_unchanged() -> None:
    row = np.arange(4, dtype=np.int32)
    blocks = Blocks(row)
    row[:] = 9
    assert blocks.ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="WRITEABLE"):
        blocks.ids.flags.writeable = True


def test_every_argument_of_a_read_may_be_changed(pair: Pair) -> None:
    payload, given = bytearray(b"first token"), {"full": Blocks([11, 12], end_token=20)}
    publication, send = offered(
        pair.source.session,
        Publish("request", given, payload=memoryview(payload)),  # type: ignore[arg-type]
    )
    payload[:5] = b"XXXXX"
    given["full"] = Blocks([50])
    wanted: dict[str, Blocks] = {"full": Blocks([1, 2])}
    tokens, layers = [0, 16], ["l"]
    read = pair.destination.read(publication.reference, wanted, tokens, layers=layers)  # type: ignore[arg-type]
    wanted.clear()
    tokens[:] = [16, 20]
    layers.clear()
    send()
    assert read.result(30).payload == b"first token"
    assert (pair.holds(1), pair.holds(2)) == (11, 10_000)


def test_layers_given_by_a_generator_are_read(pair: Pair) -> None:
    """Looked at twice, a generator is empty the second time: nothing would be read, and called good."""
    publication = pair.source.session.publish("request", {"full": Blocks([11])})
    layers = (name for name in ["l"])
    assert pair.destination.read(publication.reference, {"full": Blocks([1])}, layers=layers).result(30).bytes  # type: ignore[arg-type]
    assert pair.holds(1) == 11


def test_every_argument_of_a_registration_may_be_changed(node: str, client: Client) -> None:
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
    identity, groups = {"model": "tiny"}, [group]
    spec = EngineSpec(unique_id("engine"), groups, identity=identity)  # type: ignore[arg-type]
    identity["model"] = "another"
    groups.clear()
    assert (spec.identity, spec.groups) == ({"model": "tiny"}, (group,))
    memory = array()
    planes = list(planes_of({"l": memory}, AXES, group))
    regions, labels = [MemoryRegion(MemoryKind.DRAM, 0, memory.ctypes.data, memory.nbytes)], {"tp_rank": 0}
    keep: list[Any] = [memory]
    cache = client.register_cache(spec, planes=planes, regions=regions, labels=labels, keep=keep)
    for changed in (planes, regions, keep):
        changed.clear()
    labels["tp_rank"] = 7
    assert len(cache.rank.planes) == 2
    assert cache.rank.labels == {"tp_rank": 0}
    # Registered anew, as after a restart of the home: the same content, or the home would refuse it.
    client._loop.run(runtime_of(cache).register_again())


def test_tensors_stay_mapped_when_the_caller_forgets_them(client: Client) -> None:
    import gc
    import weakref

    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
    base = array()
    seen = weakref.ref(base)
    tensors: dict[str, Any] = {"l": base[:]}
    cache = client.register_cache(EngineSpec(unique_id("engine"), (group,)), tensors=tensors, axes=AXES)
    tensors.clear()
    del base
    gc.collect()
    assert seen() is not None
    assert cache.rank.planes


def test_geometries_hold_copies() -> None:
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
    planes, labels = list(planes_of({"l": array()}, AXES, group)), {"tp_rank": 0}
    rank = RankGeometry(0, planes, labels)  # type: ignore[arg-type]
    ranks, identity = [rank], {"model": "tiny"}
    engine = EngineGeometry("engine", [group], ranks, identity)  # type: ignore[arg-type]
    for changed in (planes, labels, ranks, identity):
        changed.clear()
    assert (len(rank.planes), rank.labels) == (2, {"tp_rank": 0})
    assert (engine.ranks, engine.identity, engine.groups) == ((rank,), {"model": "tiny"}, (group,))


def test_every_argument_of_the_ports_may_be_changed(pair: Pair, node: str) -> None:
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
    memory = array()
    memory[:] = 10_000
    with Client(node) as client:
        spec = EngineSpec(unique_id("ports"), (group,))
        scheduler = SchedulerPort(client, spec)
        worker = WorkerPort(client, spec)
        worker.register({"l": memory}, axes=AXES)
        row, payload = np.array([1, 2], np.int32), bytearray(b"payload")
        published = {"full": Blocks(np.array([11, 12], np.int32))}
        publication, send = offered(pair.source.session, Publish("request", published, payload=payload))  # type: ignore[arg-type]
        published.clear()
        payload.clear()
        send()
        scheduler.acquire("mine", publication.reference)
        while scheduler.granted("mine") is None:
            threading.Event().wait(0.01)
        blocks, tokens = {"full": Blocks(row)}, [0, 32]
        grant = scheduler.attach("mine", blocks, tokens)  # type: ignore[arg-type]
        row[:] = [40, 41]
        blocks.clear()
        tokens[:] = [0, 1]
        worker.start(grant)
        while not (ended := scheduler.finished().reads):
            scheduler.collect(worker.finished())
        assert (ended[0].error, ended[0].payload) == (None, b"payload")
        assert [int(memory[:, block].max()) for block in (1, 2, 40)] == [11, 12, 10_000]
        scheduler.close()
