"""An engine asks another one for what it has cached of a prompt, on real node servers and NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, Listing, MissReason, Prompt, ReleaseOutcome
from kvferry.errors import NotAllowed, PrefixMiss
from tests.support.caches import Model, kv, shards, write
from tests.support.certificates import Authority, tls_flags
from tests.support.engines import Engine, reader_of
from tests.support.node_servers import Kvferryd

MakeEngine = Callable[..., Engine]
MODEL = Model(heads=4)
TOKENS, CACHED = 75, 48
"""Of the prompt, and of what the source has of it: three whole blocks."""
PROMPT = Prompt(range(TOKENS))
THEIRS, OURS = [30, 4, 9], [9, 2, 17, 18, 31]


@pytest.fixture
def cells() -> np.ndarray:
    return np.full(MODEL.rank_bytes(shards(MODEL.heads, 1)[0]), 0xA5, np.uint8)


@pytest.fixture
def asker(homes: tuple[str, str], cells: np.ndarray) -> Iterator[Cache]:
    with Client(homes[1]) as client:
        yield reader_of(client, MODEL, cells)


def test_asked_engines_answer_with_their_longest_prefix_or_a_miss(
    engine: MakeEngine, homes: tuple[str, str], asker: Cache, cells: np.ndarray
) -> None:
    source = engine(homes[0], MODEL, shards(MODEL.heads, 2)).ready()
    request = kv(MODEL, 1, CACHED)
    for memory in source.memories:
        write(memory, request, THEIRS)
    # Its first block the asker has itself.
    read = asker.fetch(source.session.engine_reference, PROMPT, {"full": Blocks(OURS[1:], first_token=16)}, wait=2.0)
    (question,) = source.session.questions(timeout=20)
    assert question.prompt.digest(TOKENS) == PROMPT.digest(TOKENS)
    blocks = {"full": Blocks(THEIRS, end_token=CACHED)}
    publication = source.session.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
    result = read.result(30)
    assert (result.end_token, result.confirmed, result.prompt) == (CACHED, True, "matched")
    wanted = np.full_like(cells, 0xA5)
    _place(wanted, request)
    assert np.array_equal(cells, wanted)
    assert source.release_of(publication).outcome is ReleaseOutcome.READ
    assert not question.open
    # Another prompt is not cached.
    read = asker.fetch(source.session.engine_reference, Prompt([7]), {"full": Blocks(OURS)}, wait=2.0)
    (question,) = source.session.questions(timeout=20)
    source.session.miss(question, MissReason.NOT_CACHED)
    with pytest.raises(PrefixMiss) as found:
        read.result(30)
    assert found.value.values["why"] == "NOT_CACHED"
    assert np.array_equal(cells, wanted)


def test_engines_are_asked_by_name_with_a_certificate(tmp_path: Path, engine: MakeEngine, cells: np.ndarray) -> None:
    authority = Authority.make(tmp_path, "fleet")
    unix, flags = f"{tmp_path}/node.sock", tls_flags(authority.issue("node"))
    with (
        Kvferryd("--listen", "127.0.0.1:0", "--unix", unix, "--drain", "0", *flags) as server,
        Client(server.advertise, tls=authority.issue("asker")) as client,
    ):
        source = engine(server.address, MODEL, shards(MODEL.heads, 1)).ready()
        write(source.memories[0], kv(MODEL, 1, CACHED), THEIRS)
        named = Listing(source.spec.engine_id, server.advertise)
        reader = reader_of(client, MODEL, cells)
        read = reader.fetch(named, PROMPT, {"full": Blocks(OURS[1:], first_token=16)}, wait=2.0)
        (question,) = source.session.questions(timeout=20)
        blocks = {"full": Blocks(THEIRS, end_token=CACHED)}
        source.session.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
        assert read.result(30).end_token == CACHED
    wanted = np.full_like(cells, 0xA5)
    _place(wanted, kv(MODEL, 1, CACHED))
    assert np.array_equal(cells, wanted)


def test_engines_are_not_asked_by_name_without_a_certificate(
    engine: MakeEngine, homes: tuple[str, str], asker: Cache
) -> None:
    source = engine(homes[0], MODEL, shards(MODEL.heads, 1)).ready()
    read = asker.fetch(Listing(source.spec.engine_id, homes[0]), PROMPT, {"full": Blocks(OURS)}, wait=2.0)
    with pytest.raises(NotAllowed, match="engine_reference"):
        read.result(30)
    assert source.session.questions() == []


def _place(cells: np.ndarray, request: dict[tuple[int, str], np.ndarray]) -> None:
    """Put the second and third block of the request where the asker reads them to."""
    for (layer, component), values in request.items():
        size = MODEL.plane_bytes(component, shards(MODEL.heads, 1)[0])
        begin = (layer * len(MODEL.components) + MODEL.components.index(component)) * size
        shape = (MODEL.num_blocks, MODEL.heads, MODEL.block_tokens, MODEL.state_bytes(component))
        plane = cells[begin : begin + size].reshape(shape)
        for block in (1, 2):
            plane[OURS[block]] = values[:, 16 * block : 16 * (block + 1)]
