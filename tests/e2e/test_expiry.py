"""R1, R4, R5: a read whose lease ran out does not count, however well its bytes arrive later, and its blocks come back
only when quiet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, Interval, NixlOptions, Read, ReadState
from kvferry._wire.channel import connect
from kvferry._wire.status import failures_of
from kvferry.errors import TransferCancelled, TransferExpired, TransferStuck
from kvferry.v1.introspection_pb2 import ListTransfersRequest
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.caches import POISON, Model, expect, kv, shards, write
from tests.support.engines import Engine, reader_of
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import stop, until

MakeEngine = Callable[..., Engine]
MODEL = Model(num_blocks=64)


class Stopped:
    """A process that is stopped until the end of the block."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid or 0

    def __enter__(self) -> None:
        stop(self.pid)

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def cells() -> np.ndarray:
    return np.full(MODEL.rank_bytes(Interval(0, 4)), POISON, np.uint8)


def reading(read: Read) -> None:
    """Wait until its bytes are under way."""
    while read.state is not ReadState.READING:
        with pytest.raises(TimeoutError):
            read.exception(0.01)


def test_read_whose_lease_ran_out_is_expired_and_its_blocks_are_uncertain_until_quiet(
    tmp_path: Path, engine: MakeEngine, cells: np.ndarray
) -> None:
    with (
        NodeServerProcess(tmp_path / "home", tcp=True, ttl=3, max_ttl=3) as server,
        Client(server.address, options=NixlOptions(ucx_tls="tcp"), optimistic=False) as client,
    ):
        source = engine(server.address, MODEL, shards(4, 1), ucx_tls="tcp").ready()
        request = kv(MODEL, 20, 32)
        write(source.memories[0], request, [3, 4])
        cache = reader_of(client, MODEL, cells)
        first = source.session.publish("first", {"full": Blocks([3, 4])})
        cache.read(first.reference, {"full": Blocks([1, 2])}).result(20)
        publication = source.session.publish("second", {"full": Blocks([3, 4])})
        # Over tcp a stopped source serves nothing, and a stopped home renews nothing.
        with Stopped(source.ranks[0].process.pid):
            read = cache.read(publication.reference, {"full": Blocks([8, 9])})
            reading(read)
            with Stopped(server.pid):
                error = read.exception(20)
                assert isinstance(error, TransferExpired)
                assert not error.quiet
                assert not read.quiet
        # The source goes on and the bytes arrive: too late to count, but now nothing writes any more.
        assert read.wait_quiet(20)
        assert read.state is ReadState.FAILED
        assert isinstance(read.exception(0), TransferExpired)
        # The home still holds the publication, so a new read gets it.
        assert cache.read(publication.reference, {"full": Blocks([20, 21])}).result(20).confirmed
        memory = source.memories[0]
        wanted = expect(memory, request, [20, 21], (0, 32))
        assert np.array_equal(cells[wanted != POISON], wanted[wanted != POISON])


def failures(list_transfers: Any) -> list[str]:
    """Why reads failed, as their source's home tells it, by lease."""
    answer = list_transfers(ListTransfersRequest(), timeout=20)
    return [failures_of(transfer.reports) for transfer in answer.transfers]


def test_read_that_does_not_end_fails_by_its_own_timeout(tmp_path: Path, engine: MakeEngine, cells: np.ndarray) -> None:
    with (
        NodeServerProcess(tmp_path / "home", tcp=True) as server,
        Client(server.address, options=NixlOptions(ucx_tls="tcp")) as client,
    ):
        source = engine(server.address, MODEL, shards(4, 1), ucx_tls="tcp").ready()
        cache = reader_of(client, MODEL, cells)
        first = source.session.publish("first", {"full": Blocks([3])})
        cache.read(first.reference, {"full": Blocks([1])}).result(20)
        publication = source.session.publish("second", {"full": Blocks([3])})
        with Stopped(source.ranks[0].process.pid):
            stuck = cache.read(publication.reference, {"full": Blocks([8])}, timeout=1.5)
            assert isinstance(stuck.exception(20), TransferStuck)
            assert not stuck.quiet
            posted = cache.gauges().chunks_in_flight
            cancelled = cache.read(publication.reference, {"full": Blocks([9])})
            until(lambda: cache.gauges().chunks_in_flight > posted)
            assert not cancelled.cancel()
            assert isinstance(cancelled.exception(20), TransferCancelled)
        assert stuck.wait_quiet(20)
        with connect(server.address) as channel:
            home = IntrospectionStub(channel)
            until(lambda: "TRANSFER_STUCK (rank 0)" in failures(home.ListTransfers))
        assert cancelled.wait_quiet(20)
        assert cache.gauges().uncertain == 0
