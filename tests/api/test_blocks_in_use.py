"""A block is written by one read at a time, and not while it is published; it is free again when nothing can write to
it any more, which is not when its read has ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, NixlOptions
from kvferry._control.block_use import BlockUse
from kvferry._control.publish import Publish, PublishMore
from kvferry._memory.access import HostAccess, StillCopying
from kvferry._session import home_session_of
from kvferry.engine import ReadEnd, SchedulerPort, Tails, WorkerPort
from kvferry.errors import BadBlock, BlocksShort, InvalidField, TransferFailed, TransferStuck
from kvferry.geometry.blocks import BlockIds
from tests.api.conftest import AXES, BLOCKS, TOKENS, Pair, array
from tests.support.caches import Model, shards
from tests.support.engines import Engine, reader_of
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.offering import offered
from tests.support.waiting import stop

MODEL = Model(num_blocks=64)


def ids(*blocks: int) -> dict[str, Blocks]:
    return {"full": Blocks(blocks)}


def test_a_read_into_blocks_of_a_live_read_is_refused_and_harms_nothing(pair: Pair) -> None:
    session = pair.source.session
    publication, send = offered(session, Publish("request", ids(11, 12)))
    read = pair.destination.read(publication.reference, ids(1, 2))
    with pytest.raises(BadBlock, match=rf"destination block 2 of {BLOCKS}: read {read.read_id} may still write to it"):
        pair.destination.read(publication.reference, ids(3, 2))
    on_purpose = pair.destination.read(publication.reference, ids(3, 2), allow_overlap=True, read_id="on-purpose")
    on_purpose.cancel()
    send()
    assert read.result(30).bytes
    assert (pair.holds(1), pair.holds(3)) == (11, 10_000)


def test_blocks_are_free_when_the_read_is_quiet(pair: Pair) -> None:
    for number in range(50):
        publication = pair.source.session.publish("request", ids(11 + number % 5))
        # Not a moment after its result.
        assert pair.destination.read(publication.reference, ids(1)).result(30).bytes
        assert pair.holds(1) == 11 + number % 5


def test_blocks_count_only_if_they_may_be_written(pair: Pair) -> None:
    """A prefix that two requests share is in both of their tables."""
    publication, send = offered(pair.source.session, Publish("request", ids(11, 12, 13)))
    reads = [
        pair.destination.read(publication.reference, ids(1, 2, 3), (TOKENS, 3 * TOKENS), expected_reads=2),
        pair.destination.read(publication.reference, ids(1, 4, 5), (TOKENS, 3 * TOKENS), expected_reads=2),
        pair.destination.read(
            publication.reference, {"full": Blocks([9, 1], first_token=TOKENS)}, (TOKENS, 2 * TOKENS), expected_reads=2
        ),
    ]
    send()
    for read in reads[:2]:
        read.result(30)
    assert [pair.holds(block) for block in (1, 2, 3, 4, 5)] == [10_000, 12, 13, 12, 13]
    reads[2].exception(30)


def test_reads_of_different_layers_share_blocks(node: str, client: Client) -> None:
    use = BlockUse([Group("full", block_tokens=16, num_blocks=8)])
    writes = use.writes()
    listed = {"full": Blocks([1, 2]).ids}
    first = writes.begin("first", listed, layers=frozenset({"a"}))
    writes.begin("second", listed, layers=frozenset({"b"}))
    with pytest.raises(BadBlock, match="read first"):
        writes.begin("third", listed, layers=frozenset({"a", "c"}))
    with pytest.raises(BadBlock, match="read"):
        writes.begin("fourth", listed)
    writes.end(first)
    writes.begin("fifth", listed, layers=frozenset({"a"}))


def test_published_blocks_are_not_read_into_until_they_are_released(pair: Pair) -> None:
    published = pair.destination.session.publish("mine", ids(1, 2))
    again = pair.destination.session.publish("shares its prefix", ids(1, 3))
    offered = pair.source.session.publish("theirs", ids(11))
    for number, block in ((published.number, 2), (again.number, 3)):
        with pytest.raises(BadBlock, match=rf"publication {number} holds it"):
            pair.destination.read(offered.reference, ids(block))
    pair.destination.session.abort(published)
    assert [release.publication for release in pair.destination.session.released(30)] == [published.number]
    with pytest.raises(BadBlock, match=rf"publication {again.number} holds it"):
        pair.destination.read(offered.reference, ids(1))
    assert pair.destination.read(offered.reference, ids(2)).result(30).bytes


def test_blocks_that_a_read_writes_are_not_published(pair: Pair) -> None:
    theirs, send = offered(pair.source.session, Publish("theirs", ids(11)))
    read = pair.destination.read(theirs.reference, ids(1))
    with pytest.raises(BadBlock, match=rf"source block 1 of {BLOCKS}: read {read.read_id} may still write to it"):
        pair.destination.session.publish("mine", ids(1))
    # Nothing was lost, and nothing pinned: no number was taken.
    assert not pair.destination.session.unreleased()
    send()
    read.result(30)
    assert pair.destination.session.publish("mine", ids(1)).number == 1


def test_a_block_is_published_once_per_publication(pair: Pair) -> None:
    session = pair.source.session
    with pytest.raises(BadBlock, match=r"source block 5 .* it is given twice"):
        session.publish("request", ids(5, 5))
    assert not session.unreleased()
    publication = session.publish("request", ids(5), last=False)
    with pytest.raises(BadBlock, match=r"source block 5 .* it is given twice"):
        session.publish_more(publication, ids(5), last=True)
    session.publish_more(publication, {"full": Blocks([6], first_token=TOKENS)}, last=True)
    read = pair.destination.read(publication.reference, ids(1, 2))
    assert read.result(30).bytes == 2 * pair.mine[:, 0].nbytes


def test_groups_of_a_pool_share_their_blocks() -> None:
    groups = [Group(name, block_tokens=16, num_blocks=8, pool="device") for name in "ab"]
    use = BlockUse([*groups, Group("apart", block_tokens=16, num_blocks=8)])
    writes, rank = use.writes(0), use.writes(1)
    writes.begin("first", {"a": Blocks([1, 2]).ids})
    with pytest.raises(BadBlock, match="group 'b', destination block 2"):
        writes.begin("second", {"b": Blocks([2]).ids})
    writes.begin("third", {"apart": Blocks([2]).ids})
    # Another rank has memory of its own, but a publication speaks for all ranks.
    rank.begin("first", {"a": Blocks([1, 2]).ids})
    with pytest.raises(BadBlock):
        use.pin({"b": Blocks([1]).ids})
    # And a scheduler reads for all of them.
    with pytest.raises(BadBlock, match="read first"):
        use.writes().begin("scheduler's", {"b": Blocks([1]).ids})
    with pytest.raises(BadBlock, match="given twice"):
        use.pin({"a": Blocks([5]).ids, "b": Blocks([5]).ids})


def test_many_threads_get_each_block_once(pair: Pair) -> None:
    """Of all that want the same block at the same moment one gets it, and every byte is its own."""
    session = pair.source.session
    offers = [offered(session, Publish(f"request-{index}", ids(11 + index))) for index in range(8)]
    start = threading.Barrier(8)

    def want(index: int) -> object:
        start.wait()
        try:
            return pair.destination.read(offers[index][0].reference, ids(1))
        except BadBlock:
            return None

    with ThreadPoolExecutor(8) as pool:
        reads = list(pool.map(want, range(8)))
    won = [index for index, read in enumerate(reads) if read is not None]
    assert len(won) == 1
    for _, send in offers:
        send()
    reads[won[0]].result(30)  # type: ignore[attr-defined]
    assert pair.holds(1) == 11 + won[0]


@pytest.mark.slow
def test_blocks_of_a_failed_read_are_refused_until_it_is_quiet(
    tmp_path: Path,
    engine: Callable[..., Engine],
) -> None:
    cells = np.zeros(MODEL.rank_bytes(shards(4, 1)[0]), np.uint8)
    with (
        NodeServerProcess(tmp_path / "home", tcp=True) as server,
        Client(server.address, options=NixlOptions(ucx_tls="tcp")) as client,
    ):
        source = engine(server.address, MODEL, shards(4, 1), ucx_tls="tcp").ready()
        cache = reader_of(client, MODEL, cells)
        first = source.session.publish("first", ids(3))
        cache.read(first.reference, ids(1)).result(20)
        publication = source.session.publish("second", ids(3))
        pid = source.ranks[0].process.pid or 0
        stop(pid)
        try:
            stuck = cache.read(publication.reference, ids(8), timeout=1.5)
            assert isinstance(stuck.exception(20), TransferStuck)
            assert not stuck.quiet
            with pytest.raises(BadBlock, match=f"read {stuck.read_id} may still write to it"):
                cache.read(publication.reference, ids(8))
            with pytest.raises(BadBlock, match="may still write to it"):
                cache.session.publish("mine", ids(8))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert stuck.wait_quiet(20)
        assert cache.read(publication.reference, ids(8)).result(20).bytes


def test_attach_checks_blocks_at_once_and_a_refusal_loses_nothing(pair: Pair) -> None:
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0)
    scheduler = SchedulerPort(pair.client, EngineSpec(unique_id("scheduler"), (group,)))
    publication = pair.source.session.publish("theirs", {"full": Blocks([11, 12, 13], end_token=40)}, expected_reads=2)
    for request in ("first", "second"):
        scheduler.acquire(request, publication.reference)
        while scheduler.granted(request) is None:
            threading.Event().wait(0.01)
    wrong: list[tuple[dict[str, Blocks], type[Exception]]] = [
        ({}, InvalidField),
        ({"other": Blocks([1])}, InvalidField),
        (ids(), BlocksShort),
        (ids(1), BlocksShort),
        (ids(1, 1, 1), BadBlock),
        (ids(1, 2, 0), BadBlock),
        (ids(1, 2, BLOCKS), BadBlock),
        ({"full": Blocks([1, 2, 3], end_token=48)}, BlocksShort),
    ]
    for blocks, error in wrong:
        with pytest.raises(error):
            scheduler.attach("first", blocks)
    assert scheduler.attach("first", ids(1, 2, 3)).local
    with pytest.raises(BadBlock, match=r"destination block 3 .* may still write to it"):
        scheduler.attach("second", ids(3, 4, 5))
    with pytest.raises(BadBlock, match=r"source block 2 .* may still write to it"):
        scheduler.publish("mine", ids(2))
    assert scheduler.attach("second", ids(3, 4, 5), allow_overlap=True).local
    assert scheduler.stats().reading == 2
    scheduler.close()


@pytest.mark.slow
def test_blocks_behind_the_tokens_that_are_read_belong_to_the_read(pair: Pair) -> None:
    """`Tails.ZERO` clears them, and the workers are told after the scheduler has attached."""
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0)
    scheduler = SchedulerPort(pair.client, EngineSpec(unique_id("scheduler"), (group,)))
    scheduler.publish("mine", ids(3))
    publication = pair.source.session.publish("theirs", ids(11), expected_reads=2)
    for request in ("first", "second"):
        scheduler.acquire(request, publication.reference)
        while scheduler.granted(request) is None:
            threading.Event().wait(0.01)
    with pytest.raises(BadBlock, match=r"destination block 3 .* publication 1 holds it"):
        scheduler.attach("first", ids(1, 3, 0))
    assert scheduler.attach("first", ids(1, 2, 0)).local
    with pytest.raises(BadBlock, match=r"destination block 2 .* may still write to it"):
        scheduler.attach("second", ids(2))
    # Of which nothing is read, nothing is cleared.
    assert scheduler.attach("second", {"full": Blocks([3, 4, 5], end_token=16)}, (0, 0)).local
    scheduler.close()


def test_a_release_while_more_is_published_leaves_no_block_in_use(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release is taken at the latest moment before the step's blocks are named; they were refused for ever."""
    session = pair.destination.session
    publication = session.publish("request", ids(5), last=False)
    released: list[int] = []

    def take() -> None:
        session.abort(publication)
        released.extend(release.publication for release in session.released(20))

    taking = threading.Thread(target=take)
    name = home_session_of(session).block_use.name

    def named(ids: Mapping[str, BlockIds], number: int) -> None:
        taking.start()
        taking.join(1.0)
        name(ids, number)

    monkeypatch.setattr(home_session_of(session).block_use, "name", named)
    more = {"full": Blocks([6], first_token=TOKENS)}
    home_session_of(session).publish_more(PublishMore(publication, more, last=True))
    taking.join(30)
    assert released == [publication.number]
    theirs = pair.source.session.publish("theirs", ids(11, 12))
    assert pair.destination.read(theirs.reference, ids(5, 6)).result(30).bytes


def test_blocks_that_a_lost_device_clears_are_never_quiet(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise StillCopying("the device does not answer")

    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0)
    scheduler = SchedulerPort(pair.client, EngineSpec(unique_id("scheduler"), (group,)))
    worker = WorkerPort(pair.client, scheduler.spec, token=scheduler.token)
    worker.register({"l": array()}, axes=AXES, serve=False)
    publication = pair.source.session.publish("theirs", ids(11))
    scheduler.acquire("request", publication.reference)
    while scheduler.granted("request") is None:
        threading.Event().wait(0.01)
    monkeypatch.setattr(HostAccess, "clear", lost)
    worker.start(scheduler.attach("request", ids(1, 2)), tails=Tails.ZERO)
    ended: list[ReadEnd] = []
    while not ended:
        scheduler.collect(worker.finished())
        ended.extend(scheduler.finished().reads)
        threading.Event().wait(0.01)
    (end,) = ended
    assert isinstance(end.error, TransferFailed)
    assert not end.quiet
    with pytest.raises(BadBlock, match="may still write to it"):
        scheduler.publish("mine", ids(2))
    worker.close()
    scheduler.close()
