"""What an asker tells the home of the engine that it asks, attempt by attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry import Prompt
from kvferry._clock import from_duration
from kvferry._control.acquire_request import Acquired, AcquireRequest, ReadTerms
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.questions import AskedPrefix
from kvferry._wire.authority import question_name
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken
from kvferry.errors import (
    HomeRecovering,
    KvferryError,
    LimitReached,
    NotAllowed,
    NotPublished,
    PrefixMiss,
    PublicationAborted,
    PublicationReleased,
)
from kvferry.geometry import Group
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import READER, holding
from tests.control.scripted import Scripted, scripted

GROUPS = (Group("full", block_tokens=16, num_blocks=8),)
PROMPT = Prompt(range(40), adapter="lora")


def question(holder: LeaseHolder, home: str, wait: float = 2.0) -> AcquireRequest:
    asked = AskedPrefix(EngineToken("source", b"s" * 32, home).engine_reference, PROMPT, 16, wait, GROUPS)
    return holder.request(asked, ReadTerms(30.0, prompt=PROMPT), read_id="read")


def refused(server: Scripted, holder: LeaseHolder, request: AcquireRequest) -> KvferryError:
    """The error with which a question ends."""

    async def ask() -> Acquired:
        return await holder.acquire(request, lambda: None).first()

    with pytest.raises(KvferryError) as found:
        server.loop.run(ask())
    return found.value


def asks(server: Scripted) -> list[pb.Ask]:
    return [told.ask for request in server.notified for told in request.notifications if told.HasField("ask")]


def declines(server: Scripted) -> list[str]:
    told = [told for request in server.notified for told in request.notifications]
    return [each.decline.reference for each in told if each.HasField("decline")]


def test_a_home_is_told_what_is_asked_and_by_whom(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:

        def miss(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
            raise PrefixMiss("nothing", engine_id="source", why="BUSY")

        server.read_blocks = miss
        request = question(holder, control.address)
        found = refused(server, holder, request)
        assert (type(found), found.values["why"]) == (PrefixMiss, "BUSY")
        (ask,) = asks(server)
        assert list(ask.prompt.token_ids) == PROMPT.token_ids.tolist()
        assert (ask.prompt.adapter, ask.first_token, ask.reference) == ("lora", 16, request.text)
        assert ask.engine_reference == EngineToken("source", b"s" * 32, control.address).engine_reference
        assert 1.0 < from_duration(ask.wait) <= 2.0
        assert server.notified[0].sender.engine_id == READER.engine_id
        made = parse_reference(ask.reference)
        assert (made.engine_id, made.router_key) == ("source", question_name(made.key))
        # The home has said that there is nothing, and need not be told that nobody waits.
        assert [request.reference for request in server.asked] == [ask.reference]
        assert declines(server) == []


def test_a_question_that_is_told_again_has_the_time_that_is_left(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if len(server.notified) == 1:
                raise HomeRecovering("not yet", retry_after=0.5)
            raise NotAllowed("never", engine_id="source")

        server.notify = notify
        assert isinstance(refused(server, holder, question(holder, control.address)), NotAllowed)
        first, second = asks(server)
        assert first.reference == second.reference
        assert from_duration(second.wait) <= from_duration(first.wait) - 0.5
        assert declines(server) == []


def test_a_home_that_has_too_many_questions_is_no_answer(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:

        def notify(_: pb.NotifyRequest) -> list[pb.NotificationResult]:
            raise LimitReached("enough", retry_after=5.0, limit="questions", value=64)

        server.notify = notify
        found = refused(server, holder, question(holder, control.address))
        assert (type(found), found.values["why"]) == (PrefixMiss, "NO_ANSWER")
        # At once: there is no use in waiting.
        assert (len(asks(server)), server.asked, declines(server)) == (1, [], [])


def test_a_home_that_does_not_say_that_time_is_over_is_told_that_nobody_waits(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        request = question(holder, control.address, wait=0.05)
        found = refused(server, holder, request)
        assert (type(found), found.values["why"]) == (PrefixMiss, "NO_ANSWER")
        server.until(lambda: bool(declines(server)))
        assert declines(server) == [request.text]


@pytest.mark.parametrize(
    "end",
    [
        PublicationReleased("declined", engine_id="source", publication=1, outcome="DECLINED"),
        PublicationAborted("aborted", engine_id="source", publication=1),
        NotPublished("given up", engine_id="source", publication=1),
    ],
    ids=["released", "aborted", "given up"],
)
def test_an_answer_that_ends_before_it_is_read_is_a_miss(tmp_path: Path, end: KvferryError) -> None:
    """Its home has restarted and knows no such question, or its source has withdrawn it: the prompt is computed."""
    with scripted(tmp_path) as (server, control), holding(control) as holder:

        def ended(_: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
            raise end

        server.read_blocks = ended
        found = refused(server, holder, question(holder, control.address))
        assert (type(found), found.values["why"]) == (PrefixMiss, "NO_ANSWER")
        assert str(end) in str(found)
        assert declines(server) == []
