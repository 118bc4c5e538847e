"""No message that the client sends is larger than a node server takes, whatever there is to tell."""

from __future__ import annotations

import itertools
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Blocks, Client, EngineSpec, Group, Interval, MemoryKind, MemoryRegion, Plane
from kvferry._clock import now
from kvferry._control.notifier import BATCH, SENT_BYTES, SENT_NOTIFY_BYTES, batches
from kvferry._control.publish import Publish, PublishMore
from kvferry._session import home_session_of
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import KvferryError, MessageTooLarge
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl
from tests.support.examples import examples
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.offering import offered

pytestmark = pytest.mark.slow

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=16, num_blocks=8)
WIDE = Group("full", block_tokens=1, num_blocks=3 << 20)
SENDER = pb.EngineRef(engine_id="e" * 256, incarnation=b"i" * 16)


def published(size: int) -> pb.Notification:
    return pb.Notification(publish=pb.Publish(payload=b"x" * size))


@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 64),
            st.integers(60_000, 65_536),
            st.integers(SENT_NOTIFY_BYTES - 400, SENT_NOTIFY_BYTES - 100),
        ),
        max_size=40,
    ),
    repeat=st.integers(1, 30),
)
@settings(max_examples=examples(60))
def test_any_notifications_go_out_in_order_and_within_the_limits(sizes: list[int], repeat: int) -> None:
    told = [published(size) for size in sizes] * (repeat if sum(sizes) < 1 << 20 else 1)
    requests = list(batches(SENDER, told, session_secret=b"s" * 32))
    assert [notification for request in requests for notification in request.notifications] == told
    for request in requests:
        assert len(request.notifications) <= BATCH
        # One that fits alone has the margin for its envelope.
        assert request.ByteSize() <= SENT_NOTIFY_BYTES + (0 if len(request.notifications) > 1 else 1024)
        assert request.ByteSize() <= MAX_NOTIFY_BYTES
    for one, other in itertools.pairwise(requests):
        full = (
            len(one.notifications) == BATCH
            or one.ByteSize() + other.notifications[0].ByteSize() > SENT_NOTIFY_BYTES - 8192
        )
        assert full, "as few calls as the limits allow"


def test_a_notification_that_is_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(MessageTooLarge) as caught:
        list(batches(SENDER, [published(SENT_NOTIFY_BYTES + 1)]))
    assert int(caught.value.values["size"]) > int(caught.value.values["limit"]) == SENT_NOTIFY_BYTES
    assert not caught.value.retryable


def test_a_home_is_refilled_with_more_than_a_message_holds(tmp_path: Path) -> None:
    # A short max_ttl: what was published again is not released before it.
    server = NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=20, ttl=4, max_ttl=4).start()
    try:
        with Client(server.address) as client:
            tensors = {"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}
            spec = EngineSpec(unique_id("source"), (GROUP,))
            session = client.register_cache(spec, tensors=tensors, axes=AXES, serve=False).session
            made = [
                session.publish(f"request {number}", {"full": Blocks([1, 2])}, payload=bytes([number]) * 65_536)
                for number in range(150)
            ]
            assert len(made) * 65_536 > 2 * MAX_MESSAGE_BYTES

            server.stop(signal.SIGKILL)
            server.start()

            # The home has them all again, with what they carry, and the Watch lives: it hears of every release.
            home = BlockingControl(server.address)
            for publication in (made[0], made[75], made[149]):
                assert payload_of(home, publication.reference) == bytes([publication.number - 1]) * 65_536
            home.close()
            assert session.publish("after", {"full": Blocks([3])}).number == 151
            for publication in made[1:75]:
                client.decline(publication.reference, timeout=30)
            gone: set[int] = set()
            until = now() + 60
            while not {publication.number for publication in made[1:75]} <= gone:
                assert now() < until, gone
                gone |= {release.publication for release in session.released(1.0)}
    finally:
        server.stop()


def payload_of(home: BlockingControl, reference: str) -> bytes:
    """What a reader gets, once the home has its engines back."""
    reader = pb.EngineRef(engine_id="reader", incarnation=b"r" * 16)
    asked = pb.ReadBlocksRequest(reference=reference, reader=reader, read_id=b"r" * 16, parties=1)
    until = now() + 30
    while True:
        with suppress(KvferryError):
            answer = home.read_blocks(asked)
            if answer.HasField("complete"):
                return answer.complete.payload
        assert now() < until, "the publication is not there"


def test_blocks_of_a_step_that_fits_no_message_are_refused_before_they_are_pinned(tmp_path: Path) -> None:
    with NodeServerProcess(tmp_path / "home") as server, Client(server.address) as client:
        session = client.open_engine(EngineSpec(unique_id("source"), (WIDE,)))
        # Every second block: runs of one, six bytes each.
        blocks = Blocks(np.arange(1, 2_000_000, 2))
        for last in (True, False):
            with pytest.raises(MessageTooLarge) as caught:
                session.publish("wide", {"full": blocks}, last=last)
            assert int(caught.value.values["size"]) > SENT_NOTIFY_BYTES
        assert session.unreleased() == ()
        # No rank has registered, so that the home would refuse it.
        first, _ = offered(session, Publish("narrow", {"full": Blocks([1])}, last=False))
        with pytest.raises(MessageTooLarge):
            home_session_of(session).publish_more(PublishMore(first, {"full": blocks}, last=True))
        assert session.unreleased() == (first,)


def test_a_rank_that_fits_no_message_is_refused_at_once(tmp_path: Path) -> None:
    cells = np.zeros(1 << 20, np.uint8)
    base = cells.ctypes.data
    planes = [
        Plane(
            layer=f"{index:0256d}",
            component="key",
            group="full",
            format="plain",
            dtype="uint8",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base,
            num_blocks=8,
            block_stride=128,
            page_tokens=16,
            page_stride=0,
            block_states=16,
            unit_stride=128,
            token_stride=8,
            state_bytes=8,
            axis_size=1,
            units=Interval(0, 1),
            shared=True,
        )
        for index in range(16_384)
    ]
    with NodeServerProcess(tmp_path / "home") as server, Client(server.address) as client:
        with pytest.raises(MessageTooLarge) as caught:
            client.register_cache(
                EngineSpec(unique_id("source"), (GROUP,)),
                planes=planes,
                regions=[MemoryRegion(MemoryKind.DRAM, 0, base, len(cells))],
                serve=False,
                # As long as it would repeat what can be repeated.
                timeout=3600,
            )
        assert "16384 planes" in str(caught.value)
        assert int(caught.value.values["size"]) > SENT_BYTES
