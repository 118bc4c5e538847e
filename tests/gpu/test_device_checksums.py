"""Integrity mode on a device: blocks are summed where they lie, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry import Verification
from kvferry.errors import DataLoss
from tests.gpu.device_engines import DeviceEngine
from tests.gpu.rank_process import Settings
from tests.gpu.torch_caches import Shape, Written

SHAPE = Shape()
THERE = Written(seed=7, ids=(3, 4, 5, 17, 9), end=80)
HERE = replace(THERE, ids=(20, 2, 3, 4, 11))
FULL = Settings(integrity={"mode": "full", "patience": 20.0})
Make = Callable[..., DeviceEngine]


@pytest.mark.parametrize("way", ["device to device", "host to device", "device to host"])
def test_sums_of_both_sides_agree(engine: Make, device: str, way: str) -> None:
    """Also those of the host and of the device, and with another layout and number of ranks."""
    source_device, destination_device = (device if of == "device" else "cpu" for of in way.split(" to "))
    source = engine([source_device] * 2, SHAPE, "tokens first", settings=FULL)
    destination = engine([destination_device], SHAPE, settings=FULL)
    source.ready()
    destination.ready()
    (result,) = destination.read(source.publish(THERE, checksums=True), HERE)
    assert destination.wrong(HERE) == []
    # Of each layer, key or value, block and head.
    assert result.verification == Verification(verified=2 * 2 * 5 * 6, unverified=0)


def test_a_token_that_changes_after_it_was_summed_is_found(engine: Make, device: str) -> None:
    source, destination = (engine([device], SHAPE, settings=FULL) for _ in range(2))
    source.ready()
    destination.ready()
    publication = source.publish(THERE, checksums=True)
    source.all("write", Written(8, (17,), 50, 49))
    with pytest.raises(DataLoss) as caught:
        destination.read(publication, HERE)
    # Of each layer, key or value, and head: the sums of one block.
    assert caught.value.values["mismatches"] == str(2 * 2 * 6)
    assert destination.all("quiet") == [True]
