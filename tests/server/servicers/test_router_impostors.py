"""References of routers among impostors, which get neither another engine's name nor the room of its readers (R13)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import PublicationReleased
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.server.servicers.routers import (
    KEY,
    OTHER_KEY,
    begin,
    decline,
    engine,
    made,
    publish,
    released,
    small,
    waiting_at,
)
from tests.support.node_in_process import Node, publish_notification, raised, running
from tests.support.parties import P2, D, E, P, read_id


@pytest.mark.parametrize(("true", "impostor"), [("name", "name_dp0"), ("name_dp0", "name")])
async def test_an_engine_with_the_other_name_takes_no_reader(node: Node, true: str, impostor: str) -> None:
    """A reference for data-parallel rank 0 fits two names. The source is the engine that has the key."""
    source, stranger = engine(true), engine(impostor)
    for ref in (stranger, source):
        await node.open_engine(ref)
        await node.register(ref=ref)
    given = made(engine_id="name")
    read = await begin(node, given)
    await node.source(publish_notification(router_key="room-7", key=OTHER_KEY), ref=stranger)
    await waiting_at(node, 1)
    await node.source(publish_notification(router_key="room-7", key=KEY), ref=source)
    assert (await read).accepted.source.engine_id == true
    assert [result.HasField("done") for result in await decline(node, given)] == [True]
    assert isinstance(await raised(node.read(reference=given, read_id=read_id("late"))), PublicationReleased)
    # A decline reaches the source, too, not only the impostor.
    early = made("room-8", engine_id="name")
    assert [result.HasField("done") for result in await decline(node, early)] == [True]
    assert isinstance(await raised(node.read(reference=early)), PublicationReleased)


async def test_impostor_at_a_home_that_has_just_started_delays_no_reader(tmp_path: Path) -> None:
    """The impostor came first. The true engine's readers wait nevertheless."""
    async with running(tmp_path, new=True) as node:
        await node.open_engine(P2)
        await node.register(ref=P2)
        watch = await node.open_engine(P)
        await node.register(ref=P)
        read = await begin(node, made())
        await decline(node, made("declined"))
        await publish(node)
        assert (await read).accepted.source.incarnation == P.incarnation
        await publish(node, 2, "declined")
        assert await released(watch) == (2, pb.RELEASE_OUTCOME_DECLINED)


async def test_impostor_without_caches_does_not_end_the_wait(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        await node.open_engine(P2)
        await node.open_engine(P)
        await node.register(ref=P)
        read = await begin(node, made())
        await publish(node)
        assert (await read).accepted.source.incarnation == P.incarnation


async def test_waits_with_any_key_take_no_room_of_a_publications_own_reference(tmp_path: Path) -> None:
    async with small(tmp_path, router_keys=4) as node:
        strangers = [await begin(node, made("no-such")), await begin(node, made("no-such"), before=1, reader=E)]
        answer = await node.read(1, read_id=read_id("own"), reader=D)
        assert answer.accepted.publication == 1
        for read in strangers:
            read.cancel()
