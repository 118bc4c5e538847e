"""Sources that publish the layers of a chunk as they finish: nothing but finished layers is read before its time."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec import msgpack

from kvferry import Blocks, EngineSpec, Group, GroupKind
from kvferry.engine import Grant, GrantStep, SchedulerPort
from kvferry.errors import BadBlock, InvalidField, PublicationAborted, WrongState
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import BLOCK, LAYERS, POISON, SOON, Engine, Values
from tests.testing.stepping_engines import MINE, THEIRS, TOKENS, VALUES, Decode, Prefill, begin


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


class LayeredPrefill(Prefill):
    """A source that computes a request layer by layer."""

    finished = 0
    """Tokens of which all layers were published."""

    def compute_layer(self, layer: int, tokens: int) -> None:
        """Write and publish one layer of the tokens up to here."""
        self.write(early(layer + 1, self.finished, tokens), THEIRS)
        ids = THEIRS[self.done // BLOCK : tokens // BLOCK]
        blocks = {"full": Blocks(ids, self.done, tokens)} if ids else {}
        self.session.publish_more(self.publication, blocks, last=False, layers=[f"layer{layer}"])
        self.done = tokens

    def compute(self, tokens: int, payload: bytes = b"") -> None:
        """Write all layers of the tokens up to here, and publish what was not."""
        if tokens > self.done:
            super().compute(tokens, payload)
        else:
            self.write(VALUES[:, :, :tokens], THEIRS)
            self.session.publish_more(self.publication, {}, last=False)
        self.finished = tokens


def early(layers: int, done: int, tokens: int) -> Values:
    """What a reader has when `layers` of the tokens up to here have finished."""
    values = np.full_like(VALUES, POISON)
    values[:, :, :done] = VALUES[:, :, :done]
    values[:layers, :, :tokens] = VALUES[:layers, :, :tokens]
    return values


def test_layers_of_an_unfinished_chunk_are_read_once_they_are_finished(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Engine(fabric, "d", 2, "nhd")
    reads = begin(decode, prefill)
    for tokens in (8, 12):
        one, both = early(1, prefill.finished, tokens), early(LAYERS, 0, tokens)
        prefill.compute_layer(0, tokens)
        until(partial(decode.holds, one, MINE))
        prefill.compute(tokens)
        until(partial(decode.holds, both, MINE))
    prefill.compute_layer(0, 20)
    prefill.compute_layer(1, 20)
    # All layers have finished, and the chunk is not complete: an engine may say so later.
    until(lambda: decode.holds(early(LAYERS, 12, 20), MINE))
    assert not any(read.done() for read in reads)
    prefill.compute(20)
    prefill.compute(TOKENS)
    assert sum(read.result(SOON).bytes for read in reads) == VALUES.nbytes
    assert decode.holds(VALUES, MINE)
    assert prefill.outcome(prefill.publication).name == "READ"


def test_a_read_that_is_not_progressive_gets_no_part(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Engine(fabric, "d")
    (read,) = decode.read(prefill.reference, MINE)
    prefill.compute_layer(0, 16)
    prefill.compute_layer(1, 16)
    assert not decode.memory[0].any() or (decode.memory[0] == POISON).all()
    prefill.compute(TOKENS)
    assert read.result(SOON).bytes == VALUES.nbytes
    assert decode.holds(VALUES, MINE)


def test_a_read_of_some_layers_gets_only_these(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Engine(fabric, "d")
    (read,) = begin(decode, prefill, layers=["layer1"])
    prefill.compute_layer(0, 16)
    prefill.compute_layer(1, 16)
    only = np.full_like(VALUES, POISON)
    only[1, :, :16] = VALUES[1, :, :16]
    until(lambda: decode.holds(only, MINE))
    prefill.compute(TOKENS)
    assert read.result(SOON).bytes == VALUES.nbytes // LAYERS


def test_a_home_that_restarts_between_two_layers_is_refilled_with_them(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Engine(fabric, "d")
    (read,) = begin(decode, prefill)
    prefill.compute_layer(0, 16)
    until(lambda: decode.holds(early(1, 0, 16), MINE))
    fabric.stop_home()
    fabric.start_home()
    prefill.compute_layer(1, 16)
    until(lambda: decode.holds(early(LAYERS, 0, 16), MINE))
    prefill.compute(TOKENS)
    result = read.result(SOON)
    assert (result.bytes, result.confirmed) == (VALUES.nbytes, True)
    assert decode.holds(VALUES, MINE)


def test_a_source_that_gives_up_between_two_layers(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Engine(fabric, "d")
    (read,) = begin(decode, prefill)
    prefill.compute_layer(0, 16)
    until(lambda: decode.holds(early(1, 0, 16), MINE))
    prefill.session.abort(prefill.publication)
    assert isinstance(read.exception(SOON), PublicationAborted)
    assert read.quiet
    assert prefill.outcome(prefill.publication).name == "ABORTED"


def test_workers_receive_layers_by_grants_and_steps(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Decode(fabric)
    prefill.compute_layer(0, 16)
    grant = decode.attached(prefill)
    assert (grant.complete, grant.blocks()) == (False, {})
    # As an engine sends them: without types of Python.
    decode.worker.start(msgpack.decode(msgpack.encode(grant), type=Grant))
    until(lambda: (decode.memory["layer0"][:, MINE[0]] != 0).any())
    assert not decode.memory["layer1"].any()
    prefill.compute_layer(1, 16)
    decode.until(lambda: decode.has(1))
    prefill.compute(TOKENS, b"token")
    decode.until(lambda: decode.has(2))
    for step in decode.steps:
        decode.worker.add_step(msgpack.decode(msgpack.encode(step), type=GrantStep))
    decode.until(lambda: decode.ended)
    (end,) = decode.ended
    assert (end.error, end.payload, end.bytes) == (None, b"token", VALUES.nbytes)
    assert decode.holds(TOKENS)


def test_an_offer_names_the_layers_that_have_finished_meanwhile(fabric: Fabric) -> None:
    prefill, decode = LayeredPrefill(fabric), Decode(fabric)
    decode.scheduler.acquire("mine", prefill.reference, progressive=True)

    def offered() -> tuple[str, ...]:
        offer = decode.scheduler.granted("mine")
        return () if offer is None or offer.unfinished is None else offer.unfinished.layers

    prefill.compute_layer(0, 8)
    decode.until(lambda: offered() == ("layer0",))
    prefill.compute_layer(1, 8)
    decode.until(lambda: offered() == ("layer0", "layer1"))
    prefill.compute(8)
    decode.until(lambda: offered() == ())
    prefill.compute(TOKENS)

    def complete() -> bool:
        offer = decode.scheduler.granted("mine")
        return offer is not None and offer.complete

    decode.until(complete)


GROUPS = (
    Group("full", block_tokens=BLOCK, num_blocks=8),
    Group("window", GroupKind.WINDOW, block_tokens=BLOCK, num_blocks=8, window_tokens=4),
)
CHUNK = {"full": Blocks([1, 2], 0, 8)}


@pytest.fixture(scope="module")
def unread() -> Iterator[SchedulerPort]:
    """An engine without readers. Its end waits for the messages that its home has not taken: it has no ranks."""
    with Fabric() as fabric, contextlib.closing(SchedulerPort(fabric.client(), EngineSpec("p", GROUPS))) as port:
        yield port


@pytest.mark.parametrize(
    ("blocks", "layers", "options"),
    [
        (CHUNK, [], {}),
        (CHUNK, [""], {}),
        (CHUNK, "layer0", {}),
        (CHUNK, [7], {}),
        (CHUNK, ["n" * 257], {}),
        (CHUNK, [f"layer{index}" for index in range(8193)], {}),
        (CHUNK, ["\ud800"], {}),
        (CHUNK, ["layer0"], {"last": True}),
        ({}, ["layer0"], {}),
        ({"full": Blocks([1, 2], 0, 7)}, ["layer0"], {}),
        ({"window": Blocks([1], 0, 4)}, ["layer0"], {}),
        ({"full": Blocks([9], 0, 4)}, ["layer0"], {}),
    ],
)
def test_layers_of_blocks_that_allow_none_are_refused(
    unread: SchedulerPort, blocks: dict[str, Blocks], layers: Collection[str], options: dict[str, Any]
) -> None:
    given: Any = {"last": False, "layers": layers, **options}
    with pytest.raises((InvalidField, BadBlock)):
        unread.publish("request", blocks, **given)
    publication = unread.publish("request", {}, last=False)
    with pytest.raises((InvalidField, BadBlock)):
        unread.publish_more(publication, blocks, **given)
    # Nothing of it is left: the same blocks can be published now.
    unread.publish_more(publication, CHUNK, last=True)


def test_a_chunk_is_finished_before_the_next_one_begins(unread: SchedulerPort) -> None:
    publication = unread.publish("request", CHUNK, last=False, layers=["layer0"])
    more = {"full": Blocks([3], 8, 12)}
    with pytest.raises(InvalidField, match="until all layers"):
        unread.publish_more(publication, more, last=False, layers=["layer0"])
    with pytest.raises(InvalidField, match="where the step before ended"):
        unread.publish_more(publication, {"full": Blocks([3], 4, 8)}, last=False)
    # The blocks that were refused are not in use.
    unread.publish_more(publication, more, last=True)
    with pytest.raises(WrongState):
        unread.publish_more(publication, {}, last=False, layers=["layer1"])
