"""A router confuses two requests, on real node servers and NIXL: no byte of another prompt is written anywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry import Blocks, Prompt, ReleaseOutcome
from kvferry.errors import PromptMismatch
from tests.support.caches import POISON, Model, expect, kv, shards, write
from tests.support.engines import Engine

MakeEngine = Callable[..., Engine]
TOKENS = 75
PROMPTS = (Prompt(range(TOKENS)), Prompt([*range(TOKENS - 1), 7]))
"""Their last tokens differ."""
THEIRS = ([3, 4, 5, 30, 1], [6, 7, 8, 9, 10])
OURS = ([9, 2, 17, 18, 31], [10, 11, 12, 13, 14])


def test_swapped_references_are_refused_and_the_right_ones_are_read(engine: MakeEngine, homes: tuple[str, str]) -> None:
    model = Model(heads=6)
    source = engine(homes[0], model, shards(model.heads, 2))
    destination = engine(homes[1], model, shards(model.heads, 3), serve=False).ready()
    source.ready()
    requests = [kv(model, seed, TOKENS) for seed in (1, 2)]
    published = []
    for name, prompt, theirs, request in zip("ab", PROMPTS, THEIRS, requests, strict=True):
        for memory in source.memories:
            write(memory, request, theirs)
        published.append(source.session.publish(name, {"full": Blocks(theirs, end_token=TOKENS)}, prompt=prompt))
    for publication, prompt, ours in zip(reversed(published), PROMPTS, OURS, strict=True):
        for rank in destination.ranks:
            options = {"read_id": f"swapped {publication.number}", "parties": 3}
            rank.send_read(publication.reference, ours, (0, TOKENS), prompt=prompt, **options)
        for rank in destination.ranks:
            with pytest.raises(PromptMismatch, match="router"):
                rank.answer()
    assert all((memory.cells == POISON).all() for memory in destination.memories)
    for publication, prompt, ours in zip(published, PROMPTS, OURS, strict=True):
        for rank in destination.ranks:
            options = {"read_id": f"right {publication.number}", "parties": 3}
            rank.send_read(publication.reference, ours, (0, TOKENS), prompt=prompt, **options)
        for rank in destination.ranks:
            rank.answer()
        assert source.release_of(publication).outcome is ReleaseOutcome.READ
    for memory in destination.memories:
        # A request's bytes are all below the poison.
        wanted = [expect(memory, *each, (0, TOKENS)) for each in zip(requests, OURS, strict=True)]
        assert np.array_equal(memory.cells, np.minimum(*wanted))
