"""What a home has to hear reaches it, whatever it answers first; and who cancels does not wait for a pause to end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest

from kvferry._clock import now, to_duration
from kvferry._control import lease_holder, notifier
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.backoff import CALL_TIMEOUT, retrying
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.notifier import BATCH
from kvferry._control.reader_lease import ReaderLease
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.channel import TlsContent
from kvferry._wire.status import to_notification_error
from kvferry.errors import (
    Closed,
    HomeRecovering,
    InternalError,
    KvferryError,
    LimitReached,
    NotAllowed,
    PublicationAborted,
    PublicationStale,
    ServerDraining,
    Unreachable,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import DONE, LEASE, accepted, holding, reference
from tests.control.polling import reading
from tests.control.scripted import Scripted, polled, scripted
from tests.support.blocking_control import BlockingControl, looping, on_loop
from tests.support.waiting import until

SOON = 30.0
Answer: TypeAlias = "pb.Verdict.ValueType | KvferryError | None"


def kinds_of(request: pb.NotifyRequest) -> list[str | None]:
    return [told.WhichOneof("kind") for told in request.notifications]


def kinds(server: Scripted) -> list[str | None]:
    return [kind for request in server.notified for kind in kinds_of(request)]


def held_up(server: Scripted) -> threading.Event:
    """Have a home answer notifications only when this event is set."""
    release = threading.Event()

    def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
        release.wait(30)
        return [DONE for _ in request.notifications]

    server.notify = notify
    return release


def cancel(holder: LeaseHolder, control: Control) -> None:
    """Give a lease back."""
    lease = ReaderLease(LEASE, now(), 60.0, 20.0)
    on_loop(control._loop, lambda: holder.let_go(control, lease))


def report(
    holder: LeaseHolder,
    control: Control,
    lease: bytes,
    shares: Sequence[pb.RankReport],
    heard: list[Answer],
    span: Span = NO_SPAN,
) -> None:
    read = cast(AcquireRequest, SimpleNamespace(home=control))

    def hear(answer: NotificationAnswer | None) -> None:
        heard.append(answer.read_ended.verdict if isinstance(answer, pb.NotificationResult) else answer)

    holder.report(read, ReaderLease(lease, now(), 60.0, 20.0), shares, hear, span)


@pytest.mark.parametrize("way", ["as a result", "as a status"])
def test_a_decline_that_a_home_cannot_take_yet_is_kept(tmp_path: Path, way: str) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        refused = HomeRecovering("the home waits for its engines", retry_after=0.05)

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if len(server.notified) < 4:
                if way == "as a status":
                    raise refused
                return [pb.NotificationResult(error=to_notification_error(refused))]
            return [DONE for _ in request.notifications]

        server.notify = notify
        on_loop(server.loop, lambda: holder.decline(reference(control.address)))
        server.until(lambda: len(server.notified) >= 4)
        assert kinds(server) == ["decline"] * 4


def test_a_decline_that_a_home_refuses_is_logged_once(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        answered = threading.Event()

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if request.notifications[0].HasField("cancel"):
                answered.set()
                return [DONE]
            return [pb.NotificationResult(error=to_notification_error(PublicationStale("it is gone")))]

        server.notify = notify
        on_loop(server.loop, lambda: holder.decline(reference(control.address)))
        server.until(lambda: len(server.notified) >= 1)
        cancel(holder, control)
        assert answered.wait(30)
        assert kinds(server) == ["decline", "cancel"]


@pytest.mark.parametrize("ranks", [1, 4096])
def test_a_report_is_repeated_until_it_is_answered(tmp_path: Path, ranks: int) -> None:
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        valid = pb.NotificationResult(read_ended=pb.ReadEnded(verdict=pb.VERDICT_VALID))
        drains = [ServerDraining("not now")]

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if drains:
                raise drains.pop()
            return [valid for _ in request.notifications]

        server.notify = lambda _: []
        verdicts: list[Answer] = []
        reports = [pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE, bytes=1 << 60) for rank in range(ranks)]
        on_loop(server.loop, lambda: report(holder, control, LEASE, reports, verdicts))
        # A home that answers with less than was asked has answered nothing, and in the end is not asked again.
        until(lambda: len(verdicts) == -(-ranks // BATCH))
        assert all(isinstance(verdict, KvferryError) for verdict in verdicts)
        server.notify = notify
        on_loop(server.loop, lambda: report(holder, control, LEASE, reports, verdicts))
        until(lambda: pb.VERDICT_VALID in verdicts)
        said = [told.read_done for told in server.notified[-1].notifications]
        assert [report.rank for done in said for report in done.reports] == list(range(ranks))


def test_a_report_has_the_time_of_other_calls_from_its_second_attempt_on() -> None:
    """An overloaded home answers after more than the time for a verdict; each attempt costs it the same again."""
    timeouts: list[float] = []
    verdicts: list[Answer] = []
    traced: list[None] = []

    class Recorded(Span):
        @contextmanager
        def calling(self) -> Generator[None]:
            traced.append(None)
            yield

    class Home:
        address = "home:1"

        async def notify(self, request: pb.NotifyRequest, timeout: float) -> list[NotificationAnswer]:
            timeouts.append(timeout)
            if timeout < CALL_TIMEOUT or len(timeouts) < 3:
                raise Unreachable("no answer in time", address=self.address)
            return [pb.NotificationResult(read_ended=pb.ReadEnded(verdict=pb.VERDICT_VALID))]

    home: Any = Home()
    with looping() as loop, holding(Control("home:1", None, loop)) as holder:
        share = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE)
        on_loop(loop, lambda: report(holder, home, LEASE, [share], verdicts, Recorded()))
        until(lambda: len(timeouts) == 3)
        until(lambda: verdicts == [None, None, pb.VERDICT_VALID])
    assert timeouts == [lease_holder.VERDICT_TIMEOUT, CALL_TIMEOUT, CALL_TIMEOUT]
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("why", "level"),
    [("refused", logging.INFO), ("late", logging.WARNING), ("full", logging.WARNING), ("closed", None)],
)
def test_a_notification_that_is_given_up_is_logged_unless_the_client_is_closed(
    why: str, level: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PublicationStale("it is gone") if why == "refused" else HomeRecovering("not now", retry_after=5.0)
    monkeypatch.setattr(notifier, "MAX_WAITING", 0 if why == "full" else 1)
    go_on, answers = asyncio.Event(), list[NotificationAnswer | None]()

    class Home:
        address = "home:1"

        async def notify(self, request: pb.NotifyRequest, timeout: float) -> list[NotificationAnswer]:
            await go_on.wait()
            raise error

    home: Any = Home()
    decline = pb.Notification(decline=pb.Decline(reference="kvf1.x"))
    with caplog.at_level(logging.INFO), looping() as loop:
        one = notifier.Notifier(loop, pb.EngineRef(engine_id="reader", incarnation=b"i" * 16))
        message = notifier.Message(decline, now() + (1 if why == "late" else 60), answers.append)
        on_loop(loop, lambda: one.send(home, [message]))
        closed = loop.submit(one.close(SOON)) if why == "closed" else None
        on_loop(loop, go_on.set)
        until(lambda: bool(answers))
        if closed is not None:
            closed.result(SOON)
    assert answers == [error]
    logged = [record.levelno for record in caplog.records if "did not accept a notification" in record.message]
    assert logged == ([] if level is None else [level])


def test_what_a_home_refuses_costs_no_other_notification_of_the_call(tmp_path: Path) -> None:
    """Access is decided for the whole call, and a router may have given a reader what it may not read."""
    with scripted(tmp_path) as (server, control):

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if "decline" in kinds_of(request):
                raise NotAllowed("not this engine")
            return [DONE for _ in request.notifications]

        server.notify = notify
        answers: dict[int, NotificationAnswer | None] = {}
        told = [pb.Notification(cancel=pb.CancelRead(lease_id=LEASE)) for _ in range(6)]
        told[2] = pb.Notification(decline=pb.Decline(reference=reference(control.address)))
        one = notifier.Notifier(server.loop, pb.EngineRef(engine_id="reader", incarnation=b"i" * 16))

        def send() -> None:
            for number, notification in enumerate(told):
                one.send(control, [notifier.Message(notification, now() + 60, partial(answers.setdefault, number))])

        on_loop(server.loop, send)
        # Its end waits for the parts of the call, too.
        server.loop.run(one.close(30))
        assert len(server.notified[0].notifications) == 6
        assert isinstance(answers.pop(2), NotAllowed)
        assert list(answers.values()) == [DONE] * 5


def test_a_cancel_does_not_wait_for_the_end_of_a_pause(tmp_path: Path) -> None:
    def recovering(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        raise HomeRecovering("not now", retry_after=29.0)

    with reading(tmp_path, recovering) as (server, read):
        read.start()
        server.until(lambda: len(server.asked) >= 1)
        began = now()
        # Long enough for the answer to have come, and for the pause to have begun.
        threading.Event().wait(0.5)
        read.cancel()
        assert isinstance(read.outcome(), asyncio.CancelledError)
        assert now() - began < 29


def test_a_lease_is_given_back_whatever_error_its_home_answers(tmp_path: Path) -> None:
    """Blocks that are none."""
    group = pb.GroupBlocks(group="full", run_starts=[1], run_counts=[])
    malformed = polled(accepted=accepted(), blocks=[pb.Blocks(groups=[group])], complete=pb.Complete(steps=1))
    with reading(tmp_path, lambda _: malformed) as (_, read):
        read.start()
        assert isinstance(read.outcome(), KvferryError)
        assert [lease_id for lease_id, _ in read.given_back] == [LEASE]


def test_a_home_that_asks_for_constant_renewals_gets_a_bounded_number(tmp_path: Path) -> None:
    whole = polled(accepted=accepted(renew_every=0.0), complete=pb.Complete())
    with reading(tmp_path, lambda _: whole) as (server, read):
        server.notify = lambda request: [
            pb.NotificationResult(renewed=pb.Renewed(remaining=to_duration(60))) for _ in request.notifications
        ]
        read.start()
        assert isinstance(read.outcome(), Acquired)
        threading.Event().wait(1.0)
        assert len(server.notified) < 50
        server.until(lambda: bool(server.notified))


@pytest.mark.parametrize(
    "error",
    [
        InternalError("a bug"),
        PublicationAborted("taken back"),
        LimitReached("for good", limit="x", value=1),
        Closed("x"),
    ],
)
def test_an_error_that_is_not_retryable_is_not_repeated(error: KvferryError) -> None:
    calls = []

    async def call(left: float) -> None:
        calls.append(left)
        raise error

    with looping() as loop, pytest.raises(type(error)):
        loop.run(retrying(call, now() + 5))
    assert len(calls) == 1


@pytest.mark.parametrize(("seconds", "raised"), [(0.3, HomeRecovering), (60.0, Unreachable)])
def test_an_attempt_that_is_short_of_time_does_not_hide_why_the_call_failed(
    seconds: float, raised: type[KvferryError]
) -> None:
    """It would be said that the home may be overloaded, or that a firewall drops packets."""
    calls: list[float] = []

    async def call(left: float) -> None:
        calls.append(left)
        if len(calls) == 1:
            raise HomeRecovering("not yet", retry_after=0.2)
        raise Unreachable("there was no answer in time", retry_after=60.0, address="home:1")

    with looping() as loop, pytest.raises(raised):
        loop.run(retrying(call, now() + seconds))


def test_a_wait_without_an_answer_is_logged_with_its_subject(caplog: pytest.LogCaptureFixture) -> None:
    async def call(_: float) -> None:
        # Once it was said, what is waited for comes too late.
        raise Unreachable("nobody is there", retry_after=60.0 if caplog.records else None, address="home:1")

    with caplog.at_level(logging.WARNING), looping() as loop, pytest.raises(Unreachable):
        loop.run(retrying(call, now() + 60, what="the registration of rank 3"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the registration of rank 3" in said
    assert "nobody is there" in said


def test_a_closed_connection_raises_closed(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        release = held_up(server)
        told = server.loop.submit(control.notify(pb.NotifyRequest(notifications=[pb.Notification()]), 30))
        server.until(lambda: len(server.notified) >= 1)
        on_loop(server.loop, control.close)
        release.set()
        with pytest.raises(Closed):
            told.result(30)
        with pytest.raises(Closed):
            server.loop.run(control.notify(pb.NotifyRequest()))
        with pytest.raises(Closed):
            next(BlockingControl("", control=control).watch(pb.WatchRequest()))


def test_a_closed_connection_ends_the_calls_of_an_earlier_channel(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        release = held_up(server)
        calls = list[Future[list[NotificationAnswer]]]()
        for count in (1, 2):
            # As when the TLS files hold something else by now.
            control._shown = TlsContent(None, None, None)
            request = pb.NotifyRequest(notifications=[pb.Notification()])
            calls.append(server.loop.submit(control.notify(request, 60)))
            server.until(partial(lambda count: len(server.notified) == count, count))
        on_loop(server.loop, control.close)
        try:
            for call in calls:
                with pytest.raises(Closed):
                    call.result(20)
        finally:
            release.set()


def test_the_reports_of_several_reads_go_in_one_call_and_each_gets_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_holder, "VERDICT_TIMEOUT", 30.0)
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        said = {1: pb.VERDICT_VALID, 2: pb.VERDICT_EXPIRED, 3: pb.VERDICT_UNKNOWN}

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            leases = [told.read_done.lease_id[0] for told in request.notifications]
            return [pb.NotificationResult(read_ended=pb.ReadEnded(verdict=said[lease])) for lease in leases]

        server.notify = notify
        verdicts: dict[int, list[Answer]] = {number: [] for number in said}
        share = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE)

        def end() -> None:
            for number in said:
                report(holder, control, bytes([number]) * 16, [share], verdicts[number])

        on_loop(server.loop, end)
        until(lambda: all(verdicts.values()))
        assert verdicts == {number: [verdict] for number, verdict in said.items()}
        assert len(server.notified) == 1


def test_a_notification_that_a_home_refuses_is_repeated_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_holder, "VERDICT_TIMEOUT", 30.0)
    with scripted(tmp_path) as (server, control), holding(control) as holder:
        again = pb.NotificationResult(error=to_notification_error(HomeRecovering("not now", retry_after=0.01)))
        valid = pb.NotificationResult(read_ended=pb.ReadEnded(verdict=pb.VERDICT_VALID))
        server.notify = lambda request: [valid, again] if len(request.notifications) == 2 else [valid]
        verdicts: list[list[Answer]] = [[], []]
        share = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE)

        def end() -> None:
            for number in (0, 1):
                report(holder, control, bytes([number]) * 16, [share], verdicts[number])

        on_loop(server.loop, end)
        until(lambda: len(verdicts[1]) == 2)
        assert verdicts == [[pb.VERDICT_VALID], [None, pb.VERDICT_VALID]]
        assert [told.read_done.lease_id[0] for told in server.notified[1].notifications] == [1]
