"""Blocks get from one engine to the other, byte for byte, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry import Blocks, Client, Release, ReleaseOutcome
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.errors import (
    BlocksShort,
    InvalidField,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    WrongKey,
)
from tests.support.caches import Model, expect, kv, shards, write
from tests.support.engines import Engine

MakeEngine = Callable[..., Engine]
Homes = tuple[str, str]
Pair = tuple[Engine, Engine]


def pair(
    engine: MakeEngine, homes: Homes, model: Model, source_tp: int, destination_tp: int, ucx_tls: str = ""
) -> tuple[Engine, Engine]:
    source = engine(homes[0], model, shards(model.heads, source_tp), ucx_tls=ucx_tls)
    destination = engine(homes[1], model, shards(model.heads, destination_tp), ucx_tls=ucx_tls, serve=False)
    return source.ready(), destination.ready()


@pytest.mark.parametrize(
    ("heads", "source_tp", "destination_tp"),
    [(4, 2, 2), (4, 1, 2), (4, 2, 1), (6, 3, 2), (2, 4, 2)],
    ids=["equal", "d>p", "p>d", "3-to-2", "replicated-source"],
)
def test_read_moves_every_byte_and_touches_no_other(
    engine: MakeEngine, homes: Homes, ucx_tls: str, heads: int, source_tp: int, destination_tp: int
) -> None:
    model = Model(heads=heads)
    source, destination = pair(engine, homes, model, source_tp, destination_tp, ucx_tls)
    tokens, theirs, ours = 75, [3, 4, 5, 30, 1], [9, 2, 17, 18, 31]
    request = kv(model, 1, tokens)
    for memory in source.memories:
        write(memory, request, theirs)
    publication = source.session.publish(
        "request-1", {"full": Blocks(theirs, end_token=tokens)}, payload=b"first token"
    )
    for rank in destination.ranks:
        rank.send_read(publication.reference, ours, (0, tokens), read_id="r1", parties=destination_tp)
    results = [rank.answer() for rank in destination.ranks]
    for memory in destination.memories:
        assert np.array_equal(memory.cells, expect(memory, request, ours, (0, tokens)))
    assert all(result.confirmed and result.payload == b"first token" for result in results)
    assert all(result.request_id == "request-1" for result in results)
    wanted = sum(memory.model.rank_bytes(memory.units) for memory in destination.memories)
    assert sum(result.bytes for result in results) == wanted * tokens // (model.num_blocks * model.block_tokens)
    (release,) = source.session.released(timeout=10)
    assert (release.publication, release.request_id) == (publication.number, "request-1")
    assert release.outcome is ReleaseOutcome.READ
    (read,) = release.reads
    assert (read.reported, read.parties) == (destination_tp, destination_tp)
    assert read.bytes == sum(result.bytes for result in results)


def test_latent_cache_of_mla_is_read_whole_by_every_rank(engine: MakeEngine, homes: Homes) -> None:
    model = Model(heads=1, components=("latent", "rope"), state_elements={"latent": 32, "rope": 8})
    source, destination = pair(engine, homes, model, 2, 2)
    tokens, theirs, ours = 64, [0, 1, 2, 3], [7, 8, 9, 10]
    request = kv(model, 2, tokens)
    for memory in source.memories:
        write(memory, request, theirs)
    reference = source.session.publish("mla", {"full": Blocks(theirs)}).reference
    for rank in destination.ranks:
        rank.send_read(reference, ours, (0, tokens), read_id="r", parties=2)
    results = [rank.answer() for rank in destination.ranks]
    for memory in destination.memories:
        assert np.array_equal(memory.cells, expect(memory, request, ours, (0, tokens)))
    # Both source ranks hold all of it; each serves one reader (the line rule), so that two links work.
    assert sorted(result.source_ranks for result in results) == [(0,), (1,)]


def test_layers_can_be_read_one_part_after_the_other(one_to_one: Pair) -> None:
    source, destination = one_to_one
    model = source.model
    tokens, theirs, ours = 48, [1, 2, 3], [4, 5, 6]
    request = kv(model, 3, tokens)
    write(source.memories[0], request, theirs)
    (memory,), (rank,) = destination.memories, destination.ranks
    names = list(dict.fromkeys(plane.layer for plane in model.planes(memory.units, 0)))
    publication = source.session.publish("layers", {"full": Blocks(theirs)}, expected_reads=2)
    first = {key: values for key, values in request.items() if f"layers.{key[0]}" in names[:1]}
    assert 0 < len(first) < len(request)
    rank.read(publication.reference, ours, (0, tokens), layers=names[:1])
    assert np.array_equal(memory.cells, expect(memory, first, ours, (0, tokens)))
    with pytest.raises(InvalidField, match="no-such-layer"):
        rank.read(publication.reference, ours, (0, tokens), layers=["no-such-layer"])
    rank.read(publication.reference, ours, (0, tokens), layers=names[1:])
    assert np.array_equal(memory.cells, expect(memory, request, ours, (0, tokens)))
    # The blocks were the reader's until both parts had been read.
    assert source.release_of(publication).outcome is ReleaseOutcome.READ


def test_read_may_come_before_the_publication(one_to_one: Pair) -> None:
    source, destination = one_to_one
    model = source.model
    request = kv(model, 3, 16)
    write(source.memories[0], request, [5])
    # Only the source's engine knows the key, so the reference exists before the blocks do when the first step is empty.
    publication = source.session.publish("early", {}, last=False)
    destination.ranks[0].send_read(publication.reference, [6], (0, 16))
    source.session.publish_more(publication, {"full": Blocks([5])}, last=True)
    assert destination.ranks[0].answer().bytes > 0
    assert np.array_equal(destination.memories[0].cells, expect(destination.memories[0], request, [6], (0, 16)))


def test_prefix_that_the_destination_holds_is_left_out(engine: MakeEngine, homes: Homes, ucx_tls: str) -> None:
    model = Model()
    source, destination = pair(engine, homes, model, 1, 2, ucx_tls)
    tokens, theirs, ours = 70, [1, 2, 3, 4, 5], [20, 21, 22]
    request = kv(model, 4, tokens)
    write(source.memories[0], request, theirs)
    reference = source.session.publish("prefix", {"full": Blocks(theirs, end_token=tokens)}).reference
    for rank in destination.ranks:
        # 37 tokens are there already: the third block is written from its sixth token on.
        rank.send_read(reference, ours, (37, tokens), read_id="r", parties=2)
    for rank in destination.ranks:
        rank.answer()
    for memory in destination.memories:
        assert np.array_equal(memory.cells, expect(memory, request, ours, (37, tokens)))


def test_requests_at_once_do_not_mix(engine: MakeEngine, homes: Homes, ucx_tls: str) -> None:
    model = Model(num_blocks=64)
    source, destination = pair(engine, homes, model, 2, 1, ucx_tls)
    (rank,), (memory,) = destination.ranks, destination.memories
    requests = {index: kv(model, 100 + index, 48) for index in range(10)}
    ids = {index: [6 * index + 2, 6 * index, 6 * index + 1] for index in requests}
    for index, request in requests.items():
        for held in source.memories:
            write(held, request, ids[index])
    references = {
        index: source.session.publish(f"many-{index}", {"full": Blocks(ids[index])}).reference for index in requests
    }
    wanted = np.full_like(memory.cells, 0xA5)
    for index, request in requests.items():
        part = expect(memory, request, ids[9 - index], (0, 48))
        wanted = np.where(part != 0xA5, part, wanted)
    for index in requests:
        rank.read(references[index], ids[9 - index], (0, 48))
    assert np.array_equal(memory.cells, wanted)
    released: list[Release] = []
    while len(released) < len(requests):
        released += source.session.released(timeout=10)
    assert sorted(release.publication for release in released) == list(range(1, 11))


def test_read_of_more_than_was_published_fails_and_writes_nothing(one_to_one: Pair) -> None:
    source, destination = one_to_one
    reference = source.session.publish("short", {"full": Blocks([1, 2], end_token=20)}).reference
    with pytest.raises(BlocksShort) as caught:
        destination.ranks[0].read(reference, [1, 2], (0, 32))
    assert caught.value.values["side"] == "source"
    assert (destination.memories[0].cells == 0xA5).all()
    # The failure was reported, so the publication is on hold again and a retry finds it.
    assert destination.ranks[0].read(reference, [1, 2], (0, 20)).confirmed


def test_second_read_of_a_publication_for_one_read_fails_by_name(one_to_one: Pair) -> None:
    source, destination = one_to_one
    reference = source.session.publish("once", {"full": Blocks([1])}).reference
    destination.ranks[0].read(reference, [1], None)
    # RELEASED until the source has acknowledged it, STALE from then on.
    with pytest.raises((PublicationReleased, PublicationStale)):
        destination.ranks[0].read(reference, [2], None)


def test_publication_for_n_samples_is_released_after_the_last_read(one_to_one: Pair) -> None:
    source, destination = one_to_one
    publication = source.session.publish("sampled", {"full": Blocks([1])}, expected_reads=3)
    for block in (1, 2):
        destination.ranks[0].read(publication.reference, [block], None)
        assert publication in source.session.unreleased()
    destination.ranks[0].read(publication.reference, [3], None)
    release = source.release_of(publication)
    assert len(release.reads) == 3


def test_declined_publication_is_released_at_once(one_to_one: Pair, homes: Homes) -> None:
    source, _ = one_to_one
    publication = source.session.publish("declined", {"full": Blocks([1])})
    with Client(homes[1]) as router:
        router.decline(publication.reference)
    release = source.release_of(publication)
    assert release.outcome is ReleaseOutcome.DECLINED


def test_reference_with_another_key_reads_nothing(one_to_one: Pair) -> None:
    source, destination = one_to_one
    forged = parse_reference(source.session.publish("secret", {"full": Blocks([1])}).reference)
    forged.key = b"0" * 16
    with pytest.raises(WrongKey):
        destination.ranks[0].read(format_reference(forged), [1], None)


def test_publication_that_never_completes_is_not_waited_for_longer_than_asked(one_to_one: Pair) -> None:
    source, destination = one_to_one
    reference = source.session.publish("never", {}, last=False).reference
    with pytest.raises(PublicationTimeout):
        destination.ranks[0].read(reference, [1], None, timeout=1.0)
