"""What the holder of an engine's leases asks for, and what it tells their homes (PROTOCOL, Leases)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry._arguments import MOST_SECONDS
from kvferry._clock import now
from kvferry._control import lease_holder
from kvferry._control.acquire_request import Acquired, AcquireRequest, ReadTerms
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.homes import Homes
from kvferry._control.lease_holder import DECLINE_PATIENCE, LeaseHolder
from kvferry._control.notifier import Message, Notifier
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._prompt import Prompt
from kvferry._wire.status import to_notification_error
from kvferry._wire.token import engine_ref
from kvferry.errors import BadReference, HomeNotAllowed, InvalidField, LeaseEnded
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import LEASE, READER, accepted, reference
from tests.control.scripted import Scripted, polled, scripted
from tests.support.blocking_control import on_loop


class Holding:
    """The holder of one engine, or of one of its ranks, and a home."""

    def __init__(self, server: Scripted, control: Control, rank: int | None) -> None:
        self.server, self.control = server, control
        self.loop = server.loop
        self.homes, self.renewals = Homes(control.address, self.loop, None, ()), Renewals(self.loop)
        self.holder = LeaseHolder(self.loop, self.homes, self.renewals, READER, rank)
        self.lease = ReaderLease(LEASE, now(), 60.0, 20.0)

    def granted(self) -> ReaderLease:
        keep = partial(self.renewals.keep, self.lease, self.control, engine_ref(READER), "a read", lambda: None)
        on_loop(self.loop, keep)
        return self.lease

    def told(self, count: int = 1) -> list[pb.Notification]:
        """The notifications that the home has got, once they are so many."""
        self.server.until(lambda: len(self.all_told()) >= count)
        return self.all_told()

    def all_told(self) -> list[pb.Notification]:
        return [one for request in self.server.notified for one in request.notifications]

    def read(self) -> AcquireRequest:
        """The read that is reported."""
        return cast(AcquireRequest, SimpleNamespace(home=self.control))

    def answer(self, result: pb.NotificationResult) -> NotificationAnswer | None:
        """What a read hears of its report."""
        answers: Queue[NotificationAnswer | None] = Queue()
        self.server.notify = lambda _: [result]
        report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=7)
        on_loop(self.loop, lambda: self.holder.report(self.read(), self.lease, [report], answers.put))
        return answers.get(timeout=30)


@pytest.fixture(params=[None], ids=["engine"])
def holding(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Holding]:
    with scripted(tmp_path) as (server, control):
        made = Holding(server, control, request.param)
        yield made
        made.loop.run(made.holder.close(0))
        on_loop(made.loop, made.renewals.close)
        on_loop(made.loop, made.homes.close)


def ask(holding: Holding, timeout: float, text: str = "") -> Any:
    text = text or reference(holding.control.address)
    return holding.holder.request(text, ReadTerms(timeout, expected_reads=5), read_id="read", parties=3)


def test_a_request_names_publication_reader_and_deadline(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding.loop, "now", lambda: 1000.0)
    request = ask(holding, 2.5)
    assert request.deadline == 1002.5
    assert (request.read_id, request.parties, request.expected_reads) == ("read", 3, 5)
    assert (request.text, request.reference.publication) == (reference(holding.control.address), 1)
    assert request.home.address == holding.control.address
    assert holding.server.asked == []


@pytest.mark.parametrize("timeout", [0.0, -1.0, MOST_SECONDS * 2, float("inf"), float("nan")])
def test_a_timeout_out_of_range_is_refused(holding: Holding, timeout: float) -> None:
    with pytest.raises(InvalidField, match="timeout"):
        ask(holding, timeout)


def test_expected_reads_fit_their_field() -> None:
    assert ReadTerms(1.0, expected_reads=2**31 - 1).expected_reads == 2**31 - 1
    for wrong in (-1, 2**31):
        with pytest.raises(InvalidField):
            ReadTerms(1.0, expected_reads=wrong)


@pytest.mark.parametrize("timeout", [0.001, 1.0, MOST_SECONDS])
def test_any_timeout_in_range_makes_a_deadline(holding: Holding, timeout: float) -> None:
    assert ask(holding, timeout).deadline > now() + timeout - 60


@pytest.mark.parametrize(
    ("text", "error"), [("nonsense", BadReference), (reference("192.0.2.1:50051"), HomeNotAllowed)], ids=["bad", "far"]
)
def test_a_bad_reference_is_refused_before_any_call(holding: Holding, text: str, error: type[Exception]) -> None:
    for refused in (lambda: ask(holding, 1.0, text), lambda: holding.holder.check(text, Prompt.unknown)):
        with pytest.raises(error):
            refused()
    with pytest.raises(error):
        on_loop(holding.loop, lambda: holding.holder.decline(text))
    assert holding.server.notified == []


@pytest.mark.parametrize(
    "result",
    [
        pb.NotificationResult(read_ended=pb.ReadEnded(verdict=pb.VERDICT_VALID)),
        pb.NotificationResult(done=pb.Acknowledged()),
        pb.NotificationResult(error=to_notification_error(LeaseEnded("no such lease"))),
    ],
    ids=["verdict", "no verdict", "error"],
)
def test_a_read_hears_its_homes_answer_to_the_report(
    holding: Holding, monkeypatch: pytest.MonkeyPatch, result: pb.NotificationResult
) -> None:
    monkeypatch.setattr(lease_holder, "VERDICT_TIMEOUT", 30.0)
    answer = holding.answer(result)
    assert isinstance(answer, LeaseEnded) if result.HasField("error") else answer == result
    told = holding.told()[0].read_done
    assert told.lease_id == LEASE
    assert [(report.rank, report.bytes) for report in told.reports] == [(0, 7)]


def test_a_lease_given_back_is_renewed_no_more_and_ends_at_its_home(holding: Holding) -> None:
    granted = holding.granted()
    assert holding.lease in holding.renewals._kept
    on_loop(holding.loop, lambda: holding.holder.let_go(holding.control, granted))
    assert holding.lease not in holding.renewals._kept
    assert holding.told() == [pb.Notification(cancel=pb.CancelRead(lease_id=LEASE))]


@pytest.mark.parametrize("holding", [0, 2], indirect=True)
def test_a_rank_gives_back_its_own_share_only(holding: Holding) -> None:
    rank = holding.holder._rank
    assert rank is not None
    granted = holding.granted()
    on_loop(holding.loop, lambda: holding.holder.let_go(holding.control, granted))
    (told,) = holding.told()
    assert told.read_done.lease_id == LEASE
    assert list(told.read_done.reports) == [pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_CANCELLED)]


def test_a_dropped_lease_sends_nothing(holding: Holding) -> None:
    granted = holding.granted()
    on_loop(holding.loop, lambda: holding.holder.drop(granted))
    assert holding.lease not in holding.renewals._kept
    # Whatever it had told came first.
    other = ReaderLease(b"o" * 16, now(), 60.0, 20.0)
    on_loop(holding.loop, lambda: holding.holder.let_go(holding.control, other))
    assert [told.cancel.lease_id for told in holding.told()] == [b"o" * 16]


def test_a_decline_is_repeated_for_its_patience(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    untils: list[float] = []
    send = Notifier.send

    def sent(notifier: Notifier, home: Control, messages: Sequence[Message], **options: Any) -> None:
        untils.extend(message.until for message in messages)
        send(notifier, home, messages, **options)

    monkeypatch.setattr(Notifier, "send", sent)
    monkeypatch.setattr(holding.loop, "now", lambda: 1e9)
    text = reference(holding.control.address)
    on_loop(holding.loop, lambda: holding.holder.decline(text))
    assert holding.told() == [pb.Notification(decline=pb.Decline(reference=text))]
    assert untils == [1e9 + DECLINE_PATIENCE]


@pytest.mark.parametrize(("share", "left"), [(0.0, 8.0), (0.5, 4.0), (1.0, 0.0), (1.25, 0.0)])
def test_close_waits_no_longer_than_its_timeout(
    holding: Holding, monkeypatch: pytest.MonkeyPatch, share: float, left: float
) -> None:
    """Leases of cancelled reads take this share of the timeout; the notifications have the rest."""
    clock, given = [1000.0], list[float]()

    async def wait(_: object, *, timeout: float) -> None:
        given.append(timeout)
        clock[0] += timeout * share

    async def close(_: object, timeout: float) -> None:
        given.append(timeout)

    async def forever() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(holding.loop, "now", lambda: clock[0])
    on_loop(holding.loop, lambda: holding.holder._aside(forever()))
    with monkeypatch.context() as patch:
        patch.setattr(lease_holder, "asyncio", SimpleNamespace(wait=wait))
        patch.setattr(Notifier, "close", close)
        holding.loop.run(holding.holder.close(8.0))
    assert given == [8.0, left]


def test_a_granted_lease_is_renewed_until_it_is_dropped(holding: Holding) -> None:
    whole = polled(accepted=accepted(), complete=pb.Complete(payload=b"token"))
    holding.server.read_blocks = lambda _: whole
    request, changes = ask(holding, 60.0), list[None]()

    async def acquire() -> Acquired:
        return await holding.holder.acquire(request, lambda: changes.append(None)).first()

    found = holding.loop.run(acquire())
    assert (found.lease.lease_id, found.part.told.payload) == (LEASE, b"token")
    assert (holding.server.asked[0].parties, holding.server.asked[0].expected_reads) == (3, 5)
    assert found.lease in holding.renewals._kept
    on_loop(holding.loop, lambda: holding.holder.drop(found.lease))
    assert found.lease not in holding.renewals._kept
