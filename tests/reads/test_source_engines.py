"""Source engines that a rank is told of, and never meets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvferry import EngineSpec
from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._reads.source_engines import BREAKER_THRESHOLD, SourceEngines, _Slot
from kvferry.errors import EngineUnknown, Unreachable
from kvferry.planner import PathRule
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.geometries import engine, tensors

HERE = engine("decode", tensors(layers=1, axis=2)).geometry()
SPEC = EngineSpec("decode", HERE.groups, 1)
SOON = 20.0
"""Seconds until a handshake is given up, which a test never waits for."""


class Home:
    """A home that knows no engine."""

    address = "home:1"

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def handshake(self, request: pb.HandshakeRequest, _: float) -> Any:
        self.asked.append(request.incarnation)
        raise EngineUnknown("no such engine")


def engines() -> SourceEngines:
    reader = pb.EngineRef(engine_id="decode", incarnation=b"d" * 16)
    return SourceEngines(SPEC, reader, 0, lambda _: HERE, PathRule(), lambda *_: None, lambda _: None)


def test_engines_that_references_invent_do_not_fill_the_memory() -> None:
    found, home = engines(), Home()
    for number in range(100):
        with pytest.raises(EngineUnknown):
            found.get(cast(Control, home), "prefill", number.to_bytes(16, "big"), "reference", now() + SOON)
    assert len(home.asked) == 100
    assert not found._slots


def test_an_engine_whose_reads_keep_failing_is_remembered() -> None:
    found, home = engines(), Home()
    source = (home.address, "prefill", b"p" * 16)
    found._slots[source] = _Slot()
    for _ in range(BREAKER_THRESHOLD):
        found.failed(*source)
    for _ in range(2):
        with pytest.raises(Unreachable):
            found.get(cast(Control, home), *source[1:], "reference", now() + SOON)
    assert not home.asked
