"""A node server that cannot be reached is asked seldom, delays nobody else, and is found again when it is back."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry._clock import now
from kvferry._control import acquisition
from kvferry._control.connection import BREAKER_THRESHOLD
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.errors import EngineUnknown, HomeRecovering, KvferryError, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl
from tests.support.engines import Engine
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess, free_port

pytestmark = pytest.mark.slow

HANDSHAKE = pb.HandshakeRequest(engine_id="nobody", reader=pb.EngineRef(engine_id="me", incarnation=b"i" * 16))


def test_after_several_failures_calls_fail_at_once_until_one_gets_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NodeServerProcess(tmp_path, tcp=True)
    control = BlockingControl(server.address)
    with monkeypatch.context() as patch:
        # The first pause is a tenth of a second, which may pass between two calls.
        moment = now()
        patch.setattr(control.loop, "now", lambda: moment)
        for _ in range(BREAKER_THRESHOLD):
            with pytest.raises(Unreachable):
                control.handshake(HANDSHAKE, 5.0)
        with pytest.raises(Unreachable, match="the next attempt is due") as refused:
            control.handshake(HANDSHAKE, 5.0)
    assert refused.value.retryable
    assert refused.value.retry_after is not None
    assert 0 < refused.value.retry_after <= 1.0
    assert control.control.unreachable_for > 0
    with server:
        until = now() + 20
        error: KvferryError | None = None
        while not isinstance(error, (EngineUnknown, HomeRecovering)):
            assert now() < until, error
            try:
                control.handshake(HANDSHAKE, 5.0)
            except KvferryError as raised:
                error = raised
        # It answered, if only that it knows no such engine: that is what counts.
        assert control.control.unreachable_for == 0.0
    control.close()


def test_reads_from_homes_that_are_gone_or_hang_delay_no_other(one_to_one: tuple[Engine, Engine]) -> None:
    source, destination = one_to_one
    reference = source.session.publish("request", {"full": Blocks([1, 2])}).reference
    parsed = parse_reference(reference)
    (rank,) = destination.ranks
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        # One that takes connections and never says a word, one where nobody listens.
        for port in (hanging.getsockname()[1], free_port()):
            gone = pb.Reference()
            gone.CopyFrom(parsed)
            gone.home = f"127.0.0.1:{port}"
            assert rank.call("start_reads", format_reference(gone), {"full": Blocks([5, 6])}, 20) == 20
        assert rank.read(reference, [7, 8], (0, 32)).confirmed
        # None of those has ended, and it waited for none of them.
        assert rank.call("cancel_reads") == ["WAITING"] * 40


def test_a_home_that_stays_away_is_given_up_before_the_reads_own_timeout(
    tmp_path: Path, one_to_one: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "HOME_PATIENCE", 0.5)
    reference = parse_reference(one_to_one[0].session.publish("request", {"full": Blocks([1, 2])}).reference)
    reference.home = f"127.0.0.1:{free_port()}"
    spec = EngineSpec(unique_id("reader"), (Group("full", block_tokens=16, num_blocks=8),))
    memory = {"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}
    with NodeServerProcess(tmp_path) as server, Client(server.address, optimistic=False) as client:
        axes = ("kv", "block", "head", "token", "content")
        cache = client.register_cache(spec, tensors=memory, axes=axes, serve=False)
        read = cache.read(format_reference(reference), {"full": Blocks([5, 6])}, timeout=600.0)
        assert isinstance(read.exception(timeout=60), Unreachable)
