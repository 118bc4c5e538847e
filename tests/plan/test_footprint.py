"""What the check that divides addresses back into blocks must let pass: descriptors that run on from plane to plane."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import Blocks
from kvferry.errors import InvalidField
from kvferry.planner import plan_read
from kvferry.planner.descriptors import RawDescriptors
from tests.plan.simulation import move
from tests.plan.worlds import Layout, engine, tensors

MODEL = tensors(layers=3, axis=2)
LAYOUTS = {
    "planes apart": Layout("BPUT"),
    "units outermost": Layout("UPBT"),
    "units outermost, components side by side": Layout("UPBT", level=1),
    "blocks first": Layout("BPUT", level=1),
}


@pytest.mark.parametrize("read_into", LAYOUTS)
@pytest.mark.parametrize("read_from", LAYOUTS)
@pytest.mark.parametrize("blocks", [range(12), range(1), range(11, 12), range(2, 12)])
def test_what_runs_on_from_plane_to_plane_is_read(read_from: str, read_into: str, blocks: range) -> None:
    source = engine("p", MODEL, layout=LAYOUTS[read_from])
    destination = engine("d", MODEL, layout=LAYOUTS[read_into])
    plan = plan_read(source.geometry(), destination.geometry(), 0)
    length = 16 * len(blocks)
    theirs = {"full": Blocks(list(blocks), end_token=length)}
    assert move([plan], source, destination, theirs, {"full": Blocks(list(blocks))}, length)


def test_the_part_of_a_descriptor_behind_a_plane_is_checked_too() -> None:
    """From the last block of a plane on into the first of the next, of which the request has only the last."""
    geometry = engine("p", MODEL).geometry(), engine("d", MODEL).geometry()
    plan = plan_read(*geometry, 0)
    expansion = plan.expand({"full": Blocks([11], end_token=16)}, {"full": Blocks([11])}, None)
    (read,) = expansion.sources
    assert read.footprint is not None
    for raw in read.descriptors:
        assert isinstance(raw, RawDescriptors)
        read.footprint.check(raw)
        longer = RawDescriptors(raw.memory, raw.source, raw.destination, raw.length + np.uint64(1))
        with pytest.raises(InvalidField):
            read.footprint.check(longer)
