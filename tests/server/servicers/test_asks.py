"""Asking an engine for the beginning of a prompt, on the wire: `Notify(ask)` at its home, the question on the Watch of
its scheduler, the answer, and what is refused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from kvferry._clock import from_duration
from kvferry._wire.reference import format_reference, parse_reference, question_reference, router_reference
from kvferry.errors import (
    BadReference,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    NotAllowed,
    PeerRestarted,
    PrefixMiss,
    ServerDraining,
    WrongKey,
    WrongSession,
)
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Process, Role
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.routing import Routing
from kvferry_server.home.time_slices import TimeSlices
from kvferry_server.servicers.access import TABLE, PolicyRole
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Caller, Relays
from kvferry_server.servicers.watch import watch as watch_stream
from tests.server.servicers.routers import begin, decline, engine, released
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    Watch,
    engine_reference,
    error_of,
    proto,
    publish_notification,
    raised,
    read_done,
    reference,
    running,
    snapshot,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P

PROMPT = pb.Prompt(
    token_ids=[5, 70_000, 2**32 - 1],
    adapter="lora",
    inputs=[pb.PromptInput(offset=1, length=2, identifier="a picture's digest")],
)


def asks(given: str, **changes: Any) -> pb.Notification:
    fields: dict[str, Any] = {"reference": given, "engine_reference": engine_reference(), "prompt": PROMPT}
    return pb.Notification(ask=pb.Ask(**{**fields, **changes}))


async def asked(node: Node, ref: Any = D, **changes: Any) -> str:
    """Ask an engine; return the reference of the answer."""
    given = question_reference(ADVERTISE, P.engine_id)
    (result,) = await node.reader(asks(given, **changes), ref=ref)
    assert result.HasField("done"), result
    return given


async def refused(node: Node, given: str = "", **changes: Any) -> Any:
    (result,) = await node.reader(asks(given or question_reference(ADVERTISE, P.engine_id), **changes))
    return error_of(result)


async def publish(node: Node, given: str, number: int = 1, **changes: Any) -> pb.NotificationResult:
    """Publish under the reference of a question."""
    parsed = parse_reference(given)
    return await node.publish(number, router_key=parsed.router_key, key=parsed.key, **changes)


def miss(number: int, reason: int = pb.MISS_REASON_NOT_CACHED) -> pb.Notification:
    return pb.Notification(miss=pb.Miss(question=number, reason=reason))  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def watch(node: Node) -> Watch:
    """The Watch of the scheduler of P, whose one rank is there. Questions are numbered from 1."""
    node.home.routing = Routing(node.home.records)
    opened = await node.open_engine()
    await node.register()
    return opened


async def test_ask_becomes_a_question_and_its_answer_a_read(node: Node, watch: Watch) -> None:
    given = await asked(node, first_token=2, wait=Duration(seconds=1))
    told = await watch.next()
    question = told.question
    assert told.sequence == 1
    assert (question.number, question.reference, question.first_token) == (1, given, 2)
    assert question.prompt == PROMPT
    assert question.asker == proto(D)
    assert from_duration(question.remaining) == 1.0
    read = await begin(node, given)
    assert (await publish(node, given, payload=b"first")).HasField("published")
    answer = await read
    assert answer.complete.payload == b"first"
    assert answer.accepted.reference == reference()
    assert (await watch.next()).question_ended.number == 1
    await node.reader(read_done(answer.accepted.lease_id, 0))
    assert await released(watch) == (1, pb.RELEASE_OUTCOME_READ)


async def test_a_miss_ends_the_read_with_its_reason(node: Node, watch: Watch) -> None:
    given = await asked(node)
    read = await begin(node, given)
    assert [result.WhichOneof("kind") for result in await node.source(miss(1), miss(1), miss(99))] == ["done"] * 3
    error = await raised(read)
    assert isinstance(error, PrefixMiss)
    assert error.values == {"engine_id": P.engine_id, "why": "NOT_CACHED"}
    # A read that comes a little later learns it at once.
    assert isinstance(await raised(node.read(reference=given)), PrefixMiss)
    assert await watch.kinds(2) == ["question", "question_ended"]


@pytest.mark.parametrize(("wait", "waits"), [(Duration(), 0.2), (Duration(seconds=2), 2.0)])
async def test_no_answer_in_time_is_a_miss_and_a_later_one_is_released(
    node: Node, watch: Watch, wait: Duration, waits: float
) -> None:
    given = await asked(node, wait=wait)
    read = await begin(node, given)
    node.pass_by(waits / 2)
    assert not read.done()
    node.pass_by(waits / 2 + 0.01)
    error = await raised(read)
    assert isinstance(error, PrefixMiss)
    assert error.values["why"] == "NO_ANSWER"
    assert (await publish(node, given)).HasField("published")
    assert await watch.kinds(2) == ["question", "question_ended"]
    assert await released(watch) == (1, pb.RELEASE_OUTCOME_DECLINED)


async def test_read_learns_of_a_question_that_ends_in_the_moment_in_which_it_begins_to_wait(
    node: Node, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, wait = await asked(node), node.home.routing.wait

    def waited(*arguments: Any) -> Any:
        waiting = wait(*arguments)
        node.clock.pass_by(1.0)
        return waiting

    monkeypatch.setattr(node.home.routing, "wait", waited)
    error = await asyncio.wait_for(raised(node.read(reference=given)), TIMEOUT / 2)
    assert isinstance(error, PrefixMiss)


async def test_ask_that_is_declined_is_withdrawn(node: Node, watch: Watch) -> None:
    given = await asked(node)
    read = await begin(node, given)
    (result,) = await decline(node, given)
    assert result.HasField("done")
    assert isinstance(await raised(read), PrefixMiss)
    assert await watch.kinds(2) == ["question", "question_ended"]
    assert isinstance(await refused(node, given), PrefixMiss)


async def test_ask_under_another_address_of_this_home_is_withdrawn_here(node: Node, watch: Watch) -> None:
    """Not sent on to that address: an asker knows the home as it likes."""
    given = question_reference("other.example:7423", P.engine_id)
    await node.reader(asks(given))
    (result,) = await decline(node, given)
    assert result.HasField("done")
    assert await watch.kinds(2) == ["question", "question_ended"]


async def test_prompt_reaches_the_source_without_fields_that_the_home_does_not_know(node: Node, watch: Watch) -> None:
    await asked(node, prompt=pb.Prompt.FromString(PROMPT.SerializeToString() + b"\xfa\x01\x01x"))
    assert (await watch.next()).question.prompt.SerializeToString() == PROMPT.SerializeToString()


async def test_ask_is_idempotent(node: Node, watch: Watch) -> None:
    given = await asked(node)
    for _ in range(2):
        (result,) = await node.reader(asks(given), ref=E)
        assert result.HasField("done")
    await publish(node, given)
    (result,) = await node.reader(asks(given))
    assert result.HasField("done")
    assert await watch.kinds(2) == ["question", "question_ended"]
    await asked(node)
    assert (await watch.next()).question.number == 2


async def test_open_questions_are_part_of_the_full_state_and_of_what_a_resumed_watch_lacks(
    node: Node, watch: Watch
) -> None:
    given = await asked(node, wait=Duration(seconds=2))
    other = await asked(node)
    assert await watch.kinds(2) == ["question", "question"]
    await decline(node, other)
    node.clock.pass_by(0.5)
    watch.cancel()
    full = Watch(node)
    assert (await full.next()).HasField("opened")
    state = await full.next()
    assert (state.sequence, state.question.number, state.question.reference) == (0, 1, given)
    assert from_duration(state.question.remaining) == 1.5
    assert await full.kinds(1) == ["synced"]
    later = await asked(node)
    assert (await full.next()).question.reference == later
    resumed = Watch(node, resume_epoch=node.home.epoch, resume_sequence=2)
    assert (await resumed.next()).opened.resumed
    assert (await resumed.next()).question_ended.number == 2
    assert (await resumed.next()).question.reference == later


async def test_watch_that_is_slow_is_not_sent_questions_that_have_ended(node: Node, watch: Watch) -> None:
    """Their prompts are gone, and nobody waits for the answers."""
    prompt = pb.Prompt(token_ids=range(100_000, 350_000))
    references = [await asked(node, prompt=prompt, wait=Duration(seconds=2)) for _ in range(8)]
    for given in references[:-1]:
        await decline(node, given)
    sent = list[pb.Question]()
    while not sent or sent[-1].reference != references[-1]:
        told = await watch.next()
        if told.HasField("question"):
            sent.append(told.question)
    # gRPC holds what does not fit the connection: of questions so large, not many.
    assert len(sent) < len(references)
    assert all(question.prompt == prompt for question in sent)


async def test_question_that_ends_while_others_are_sent_is_left_out(node: Node, watch: Watch) -> None:
    process = Process(P, Role.SCHEDULER)
    async with aclosing(watch_stream(node.home, process, SECRETS[P], node.home.epoch, 0)) as stream:
        assert (await anext(stream)).HasField("opened")
        references = [await asked(node) for _ in range(3)]
        assert (await anext(stream)).question.number == 1
        await decline(node, references[1])
        assert (await anext(stream)).question.number == 3
        assert (await anext(stream)).question_ended.number == 2
    async with aclosing(watch_stream(node.home, process, SECRETS[P], b"", 0)) as stream:
        assert (await anext(stream)).HasField("opened")
        assert (await anext(stream)).question.number == 1
        await decline(node, references[2])
        assert (await anext(stream)).HasField("synced")


async def test_watches_that_do_not_take_their_questions_do_not_fill_the_home(tmp_path: Path) -> None:
    """Watches that were taken over, of one process: each would hold the message of a question."""
    async with running(tmp_path, Limits(memory=16 << 20, engine_memory=64 << 10)) as node, AsyncExitStack() as streams:
        await node.open_engine()
        await node.register()
        given = await asked(node, prompt=pb.Prompt(token_ids=range(100_000, 350_000)), wait=Duration(seconds=2))
        source, host, used = P, "192.0.2.7", node.home.memory.used

        async def stuck() -> bool:
            """Open a Watch that takes nothing more once it is sent a question; return whether it was sent one."""
            process = Process(source, Role.SCHEDULER)
            stream = watch_stream(node.home, process, SECRETS[source], b"", 0, host)
            await streams.enter_async_context(aclosing(stream))
            assert (await anext(stream)).HasField("opened")
            return (await anext(stream)).HasField("question")

        sent = [await stuck() for _ in range(40)]
        assert sent == sorted(sent, reverse=True)
        assert 2 <= sum(sent) <= 8
        assert node.home.memory.used - used > sum(sent) * 1_000_000
        # Nobody else has less room: another host's Watch is sent the question.
        host = "192.0.2.8"
        assert await stuck()
        # On the UNIX socket, where all callers are one host, another engine is still sent a small one.
        # Three times it fits what an engine gets in any case: once for its asker, and for two Watches that are sent it.
        host, small = "", pb.Prompt(token_ids=range(100_000, 104_500))
        await asked(node, P2, prompt=small)
        assert not all([await stuck() for _ in range(100)])
        await node.open_engine(E)
        await node.register(ref=E)
        theirs = {"reference": question_reference(ADVERTISE, E.engine_id), "engine_reference": engine_reference(E)}
        await asked(node, prompt=small, ref=E, **theirs)
        source = E
        assert await stuck()
        await decline(node, given)
        await streams.aclose()
        assert node.home.memory.used < used


async def test_large_prompt_reaches_the_source_whole(node: Node, watch: Watch) -> None:
    prompt = pb.Prompt(token_ids=range(100_000, 350_000))
    given = await asked(node, prompt=prompt)
    question = (await watch.next()).question
    assert question.prompt == prompt
    # Its asker pays for it, until it ends.
    held = node.home.memory.used
    await decline(node, given)
    assert held - node.home.memory.used > prompt.ByteSize()


async def test_engine_has_to_be_named_by_its_engine_reference_without_a_certificate(node: Node, watch: Watch) -> None:
    error = await refused(node, engine_reference="")
    assert isinstance(error, NotAllowed)
    assert (error.values["role"], error.values["engine_id"]) == ("reader", P.engine_id)
    assert isinstance(await refused(node, engine_reference="kvf1e.AAAA"), BadReference)
    assert isinstance(await refused(node, engine_reference=reference()), BadReference)
    error = await refused(node, engine_reference=engine_reference(E))
    assert isinstance(error, InvalidField)
    assert error.values["field"] == "ask.engine_reference"


@pytest.mark.parametrize("name", [P.engine_id, f"{P.engine_id}_dp0"])
async def test_engine_is_asked_by_either_name_that_the_reference_may_mean(node: Node, name: str) -> None:
    """As it is read by."""
    ref = engine(name)
    watch = await node.open_engine(ref)
    await node.register(ref=ref)
    given = question_reference(ADVERTISE, P.engine_id)
    request = pb.NotifyRequest(sender=proto(D), notifications=[asks(given, engine_reference="")])
    caller = Caller("192.0.2.7", frozenset({b"a name in a certificate"}))
    answer = await notify(node.home, Relays(ADVERTISE, None, anywhere=False), request, TIMEOUT, caller)
    assert answer.results[0].HasField("done")
    assert (await watch.next()).question.reference == given


async def test_engine_reference_with_a_wrong_key_or_incarnation_is_refused(node: Node, watch: Watch) -> None:
    assert isinstance(await refused(node, engine_reference=engine_reference(P2)), PeerRestarted)
    named = pb.EngineReference(home=ADVERTISE, engine_id=P.engine_id, incarnation=P.incarnation, key=b"?" * 16)
    assert isinstance(await refused(node, engine_reference=format_reference(named)), WrongKey)
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    assert isinstance(await refused(node), EngineUnknown)
    await node.open_engine(P2)
    assert isinstance(await refused(node), PeerRestarted)


async def test_engine_without_a_watch_or_ranks_is_a_miss(node: Node) -> None:
    watch = await node.open_engine()
    assert isinstance(await refused(node), PrefixMiss)
    await node.register()
    await node.leaves(watch)
    error = await refused(node)
    assert isinstance(error, PrefixMiss)
    assert error.values["why"] == "NO_ANSWER"


async def test_home_that_recovers_or_drains_is_asked_again(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        assert isinstance(await refused(node), HomeRecovering)
        watch = Watch(node)
        assert await watch.kinds(2) == ["opened", "synced"]
        await node.register()
        assert isinstance(await refused(node), HomeRecovering)
        await node.source(*snapshot())
        node.home.drain()
        assert isinstance(await refused(node), ServerDraining)


async def test_questions_end_when_their_home_begins_to_drain(node: Node, watch: Watch) -> None:
    """It takes no answer any more: the asker computes at once, and the source pins no blocks for it."""
    given = await asked(node, wait=Duration(seconds=2))
    read = await begin(node, given)
    assert await watch.kinds(1) == ["question"]
    node.home.drain()
    error = await raised(read)
    assert isinstance(error, PrefixMiss)
    assert error.values["why"] == "NO_ANSWER"
    assert await watch.kinds(2) == ["question_ended", "draining"]


async def test_home_of_another_engine_is_not_asked(node: Node, watch: Watch) -> None:
    """As `ReadBlocks`: nothing is sent on."""
    other = engine("elsewhere")
    given = question_reference("other.example:7423", other.engine_id)
    error = await refused(node, given, engine_reference=engine_reference(other))
    assert isinstance(error, EngineUnknown)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": pb.Prompt()}, "ask.prompt.token_ids"),
        ({"first_token": 3}, "ask.first_token"),
        ({"wait": Duration(seconds=2, nanos=1)}, "ask.wait"),
        ({"wait": Duration(seconds=-1)}, "ask.wait"),
        ({"prompt": pb.Prompt(token_ids=[1], adapter="a" * 257)}, "ask.prompt.adapter"),
        ({"prompt": pb.Prompt(token_ids=[1], inputs=[pb.PromptInput(identifier="i")] * 257)}, "ask.prompt.inputs"),
        ({"prompt": pb.Prompt(token_ids=[1], inputs=[pb.PromptInput()])}, "ask.prompt.inputs.identifier"),
        (
            {"prompt": pb.Prompt(token_ids=[1], inputs=[pb.PromptInput(offset=2**63, identifier="i")])},
            "ask.prompt.inputs.offset",
        ),
        (
            {"prompt": pb.Prompt(token_ids=[1], inputs=[pb.PromptInput(length=2**63, identifier="i")])},
            "ask.prompt.inputs.length",
        ),
        ({"reference": reference()}, "ask.reference"),
        ({"reference": router_reference(ADVERTISE, P.engine_id)}, "ask.reference"),
        ({"reference": router_reference(ADVERTISE, P.engine_id, router_key="room-7")}, "ask.reference"),
    ],
)
async def test_ask_is_checked_field_by_field(node: Node, watch: Watch, changes: dict[str, Any], field: str) -> None:
    error = await refused(node, **changes)
    assert isinstance(error, InvalidField)
    assert error.values["field"] == field
    assert node.home.journal.questions.total() == 0


async def test_miss_takes_the_session_of_the_source_and_a_reason(node: Node, watch: Watch) -> None:
    given = await asked(node)
    request = pb.NotifyRequest(sender=proto(P), session_secret=SECRETS[D], notifications=[miss(1)])
    assert isinstance(await raised(node.kv.Notify(request, timeout=TIMEOUT)), WrongSession)
    # Another engine's miss is about its own questions.
    await node.open_engine(E)
    await node.source(miss(1), ref=E)
    for reason in (pb.MISS_REASON_UNSPECIFIED, pb.MISS_REASON_NO_ANSWER, 99):
        (result,) = await node.source(miss(1, reason))
        error = error_of(result)
        assert isinstance(error, InvalidField)
        assert error.values["field"] == "miss.reason"
    read = await begin(node, given)
    await publish(node, given)
    assert (await read).accepted.publication == 1


async def test_miss_that_comes_after_a_restart_of_the_home_is_about_no_other_question(tmp_path: Path) -> None:
    """R6: it was sent to the home before, and is repeated while that home is away."""
    numbers = list[int]()
    for _ in range(2):
        async with running(tmp_path) as node:
            watch = await node.open_engine()
            await node.register()
            given = await asked(node)
            numbers.append((await watch.next()).question.number)
            if len(numbers) == 2:
                await node.source(miss(numbers[0]))
            read = await begin(node, given)
            assert (await publish(node, given)).HasField("published")
            assert (await read).accepted.publication == 1
    assert numbers[0] != numbers[1]


async def test_asking_needs_the_reader_role_of_every_engine_that_the_reference_may_mean() -> None:
    def needs(given: str) -> set[tuple[tuple[PolicyRole, ...], str | None]]:
        request = pb.NotifyRequest(notifications=[asks(given)])
        return {(need.roles, need.engine_id) for need in TABLE["/kvferry.v1.KVTransfer/Notify"].needs(request)}

    reader = (PolicyRole.READER,)
    assert needs(question_reference("h:1", "prefill")) == {(reader, "prefill"), (reader, "prefill_dp0")}
    assert needs("damaged") == {(reader, None)}


async def test_miss_needs_the_engine_role() -> None:
    request = pb.NotifyRequest(sender=proto(P), notifications=[miss(1)])
    (need,) = TABLE["/kvferry.v1.KVTransfer/Notify"].needs(request)
    assert (need.roles, need.engine_id) == ((PolicyRole.ENGINE,), P.engine_id)


async def test_flood_of_questions_is_refused_beside_renewals(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(memory=16 << 20, engine_memory=64 << 10)) as node:
        await node.open_engine()
        await node.register()
        await node.publish(9)
        lease_id = (await node.read(9)).accepted.lease_id
        prompt = pb.Prompt(token_ids=range(100_000, 150_000))

        async def flood(number: int) -> str:
            (result,) = await node.reader(asks(question_reference(ADVERTISE, P.engine_id), prompt=prompt))
            return error_of(result).reason if result.HasField("error") else ""

        refusals, renewed = await asyncio.gather(
            asyncio.gather(*map(flood, range(100))), node.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
        )
        assert {reason for reason in refusals if reason} == {"LIMIT"}
        assert sum(not reason for reason in refusals) <= 32
        assert renewed[0].HasField("renewed")
        # The source, and other askers, have their share.
        assert (await node.publish(10, payload=b"x" * 1000)).HasField("published")
        await asked(node, ref=E)


async def test_ask_waits_among_long_calls(node: Node, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may have 1 MiB: beside renewals, it counts as a batch does."""
    lanes = list[bool]()

    begin = TimeSlices.begin

    async def recorded(self: TimeSlices, host: str, *, short: bool) -> None:
        lanes.append(short)
        await begin(self, host, short=short)

    monkeypatch.setattr(TimeSlices, "begin", recorded)
    await asked(node)
    await node.source(miss(1))
    await node.reader(pb.Notification(renew=pb.Renew(lease_id=b"l" * 16)))
    # Before them, the request with the prompt was measured.
    assert lanes[-3:] == [False, True, True]


async def test_listings_show_waiting_askers_and_none_of_their_secrets(node: Node, watch: Watch) -> None:
    given = await asked(node)
    read = await begin(node, given)
    listed = await node.introspection.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT)
    (transfer,) = listed.transfers
    assert transfer.router_key == parse_reference(given).router_key
    assert parse_reference(given).key not in listed.SerializeToString()
    await node.source(miss(1))
    assert isinstance(await raised(read), PrefixMiss)


async def test_publish_that_is_refused_leaves_the_question_open(node: Node, watch: Watch) -> None:
    given = await asked(node)
    parsed = parse_reference(given)
    wrong = publish_notification(1, router_key=parsed.router_key, key=parsed.key)
    wrong.publish.groups[0].run_starts[0] = 5000
    (result,) = await node.source(wrong)
    assert error_of(result).reason == "BAD_BLOCK"
    read = await begin(node, given)
    assert (await publish(node, given, 2)).HasField("published")
    assert (await read).accepted.publication == 2
