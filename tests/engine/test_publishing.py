"""What a scheduler publishes reaches the home in few calls, and one publication's failure is none of another's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group, Publication, Release, ReleaseOutcome
from kvferry._control import publication_sender
from kvferry._control.backoff import CALL_TIMEOUT
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.notifier import BATCH
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import (
    HomeRecovering,
    InvalidField,
    KvferryError,
    LimitReached,
    MessageTooLarge,
    PeerRestarted,
    Unreachable,
)
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_SKIPPED
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SOON = 30.0

Notify: TypeAlias = Callable[[Control, pb.NotifyRequest, float], Awaitable[list[NotificationAnswer]]]


class Calls:
    """The calls by which publications are sent: the first waits for the test, and the test may change answers."""

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.begun, self.go = threading.Event(), threading.Event()
        self.sent: list[list[tuple[int, int]]] = []
        self.timeouts: list[float] = []
        self.change: Callable[[int, pb.Publish], KvferryError | None] = lambda *_: None
        self.fail: Callable[[int], KvferryError | None] = lambda _: None
        self.fail_after: Callable[[int], KvferryError | None] = lambda _: None
        self.refuse_abort: Callable[[int], KvferryError | None] = lambda _: None
        self.aborts = 0

    async def __call__(
        self, control: Control, request: pb.NotifyRequest, timeout: float = 5.0
    ) -> list[NotificationAnswer]:
        published = [told.publish for told in request.notifications if told.HasField("publish")]
        call = len(self.sent)
        if published:
            self.timeouts.append(timeout)
            self.sent.append([(step.publication, step.step) for step in published])
            self.begun.set()
            assert await asyncio.to_thread(self.go.wait, SOON)
            if failure := self.fail(call):
                raise failure
        changed = [self.changed(call, told) for told in request.notifications]
        kept = [told for told, error in zip(request.notifications, changed, strict=True) if error is None]
        passed = pb.NotifyRequest(sender=request.sender, session_secret=request.session_secret, notifications=kept)
        answers = iter(await self.notify(control, passed, timeout) if kept else [])
        results = [next(answers) if error is None else error for error in changed]
        if published and (failure := self.fail_after(call)):
            raise failure
        return results

    def changed(self, call: int, told: pb.Notification) -> KvferryError | None:
        """The error with which the test answers, if it does."""
        if told.HasField("publish"):
            return self.change(call, told.publish)
        if told.HasField("abort"):
            self.aborts += 1
            return self.refuse_abort(self.aborts)
        return None


@pytest.fixture
def port() -> Iterator[SchedulerPort]:
    with Fabric() as fabric:
        client = fabric.client()
        spec = EngineSpec("prefill", (Group("full", block_tokens=16, num_blocks=32),))
        scheduler, worker = SchedulerPort(client, spec), WorkerPort(client, spec)
        worker.register({"layer": np.zeros((2, 32, 1, 16, 4), np.float32)}, axes=AXES)
        yield scheduler
        worker.close()
        scheduler.close()


@pytest.fixture
def calls(port: SchedulerPort, monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls(Control.notify)
    monkeypatch.setattr(Control, "notify", lambda control, request, timeout=5.0: made(control, request, timeout))
    return made


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many notifications a call takes: few."""
    few = 4
    monkeypatch.setattr("kvferry._control.notifier.BATCH", few)
    monkeypatch.setattr(publication_sender, "BATCH", few)
    return few


def all_released(port: SchedulerPort, count: int) -> list[Release]:
    """Wait for so many releases."""
    found: list[Release] = []

    def released() -> bool:
        found.extend(port.released())
        return len(found) >= count

    until(released)
    return found


def publish(port: SchedulerPort, block: int, *, last: bool = True) -> int:
    return port.publish(f"request {block}", {"full": Blocks([block])}, last=last).number


def test_publications_made_during_a_call_go_in_the_next(port: SchedulerPort, calls: Calls) -> None:
    first = publish(port, 1)
    assert calls.begun.wait(SOON)
    others = [publish(port, block) for block in range(2, 6)]
    calls.go.set()
    until(lambda: len(calls.sent) == 2)
    assert calls.sent == [[(first, 0)], [(number, 0) for number in others]]
    # All of them are there, each in a message of its own.
    port.abort(port.publish("last", {"full": Blocks([9])}))
    port.close()
    assert sum(map(len, calls.sent)) == 6


def steps(port: SchedulerPort, *blocks: int) -> Publication:
    """Publish a block per step."""
    publication = port.publish("steps", {"full": Blocks(blocks[:1])}, last=False)
    for index, block in enumerate(blocks[1:], 1):
        port.publish_more(publication, {"full": Blocks([block], first_token=16 * index)}, last=index == len(blocks) - 1)
    return publication


def test_steps_of_one_publication_go_together_behind_the_first_of_all(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    number = steps(port, 2, 3, 4).number
    other = publish(port, 5)
    calls.go.set()
    until(lambda: sum(map(len, calls.sent)) == 5)
    assert calls.sent[1:] == [[(number, 0), (other, 0), (number, 1), (number, 2)]]
    port.close()


def test_a_publication_takes_no_room_of_others(port: SchedulerPort, calls: Calls, small_calls: int) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    number = steps(port, *range(2, 9)).number
    others = [publish(port, block) for block in range(9, 9 + small_calls)]
    calls.go.set()
    until(lambda: sum(map(len, calls.sent)) == 8 + len(others))
    assert calls.sent[1] == [(number, 0), *((other, 0) for other in others[:-1])]
    assert [step for call in calls.sent for sent, step in call if sent == number] == list(range(7))


@pytest.mark.parametrize("waits", [0, 1])
def test_steps_behind_a_waiting_step_are_sent_after_it(port: SchedulerPort, calls: Calls, waits: int) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publication = steps(port, 2, 3, 4)
    number = publication.number
    busy = HomeRecovering("not now", retry_after=0.01)
    calls.change = lambda call, step: busy if (call, step.publication, step.step) == (1, number, waits) else None
    calls.go.set()
    # The home has refused those behind it.
    every = [(number, step) for step in range(3)]
    expected = [every, every[waits : waits + 1], every[waits + 1 :]]
    until(lambda: len(calls.sent) == 1 + len(expected))
    assert calls.sent[1:] == expected
    port.abort(publication)
    assert [(release.publication, release.local) for release in all_released(port, 1)] == [(number, False)]


@pytest.mark.parametrize("taken", [0, 1])
def test_a_waiting_step_is_not_sent_again_once_it_is_aborted(port: SchedulerPort, calls: Calls, taken: int) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publication = steps(port, 2, 3, 4)
    port.abort(publication)
    number = publication.number
    busy = HomeRecovering("not now", retry_after=0.01)
    calls.change = lambda call, step: busy if step.publication == number and step.step >= taken else None
    calls.go.set()
    assert [(release.publication, release.local) for release in all_released(port, 1)] == [(number, False)]
    assert calls.sent[1:] == [[(number, step) for step in range(3)]]
    assert calls.aborts == 1


@pytest.mark.slow
def test_a_step_that_a_home_did_not_take_for_long_is_taken_when_the_home_is_back(
    port: SchedulerPort, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publications = [steps(port, block, block + 1) for block in range(2, 22, 2)]
    started, back = time.monotonic(), threading.Event()
    calls.fail = lambda _: None if back.is_set() else Unreachable("no answer", address="home")
    calls.go.set()
    until(lambda: time.monotonic() > started + CALL_TIMEOUT + 1.0)
    assert port.released() == []
    back.set()
    taken = {(publication.number, step) for publication in publications for step in range(2)}
    until(lambda: taken <= {sent for call in calls.sent for sent in call})
    for publication in publications:
        port.abort(publication)
    assert {(release.local, release.outcome) for release in all_released(port, len(publications))} == {
        (False, ReleaseOutcome.ABORTED)
    }
    # One line for all of them.
    assert sum("publications of engine 'prefill' wait" in record.getMessage() for record in caplog.records) == 1


def test_a_publication_that_no_home_takes_within_the_hold_is_given_up(
    port: SchedulerPort, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    port._session.patience = 0.5
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publications = [port.publish("lost", {"full": Blocks([block])}) for block in (2, 3, 4)]
    busy = HomeRecovering("not now", retry_after=0.01)
    calls.change = lambda _, step: busy if step.publication > 1 else None
    calls.go.set()
    # Their blocks are free when the home says so.
    found = all_released(port, len(publications))
    assert sorted((release.publication, release.local) for release in found) == [
        (publication.number, False) for publication in publications
    ]
    lost = [record.getMessage() for record in caplog.records if "could not send" in record.getMessage()]
    assert len(lost) == 1
    assert f"publication {publications[0].number}: request 'lost' is given up: " in lost[0]
    # Of one alone, that line has said all.
    summed = [record.getMessage() for record in caplog.records if "were given up before" in record.getMessage()]
    assert all(int(line.split()[0]) > 1 for line in summed), summed


def test_a_home_that_takes_steps_behind_a_refused_one_may_have_all(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    number = steps(port, 2, 3).number
    notify = calls.notify

    async def lie(control: Control, request: pb.NotifyRequest, timeout: float) -> list[NotificationAnswer]:
        if [told.publish.step for told in request.notifications] == [1]:
            return [pb.NotificationResult(published=pb.Published())]
        return await notify(control, request, timeout)

    calls.notify = lie
    refusal = InvalidField("groups", "none", "some")
    calls.change = lambda call, step: refusal if (step.publication, step.step) == (number, 0) else None
    calls.go.set()
    # Readers may have been told: its blocks stay pinned until the home releases it.
    assert [(release.publication, release.local) for release in all_released(port, 1)] == [(number, False)]
    assert calls.aborts == 1


def test_refused_and_waiting_steps_hold_up_no_other_publication(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    refused, waits, good = (publish(port, block) for block in (2, 3, 4))
    answers: dict[tuple[int, int], KvferryError] = {
        (1, refused): InvalidField("groups", "none", "some"),
        (1, waits): HomeRecovering("not now", retry_after=0.01),
    }
    calls.change = lambda call, step: answers.get((call, step.publication))
    calls.go.set()
    until(lambda: len(calls.sent) == 3)
    assert calls.sent[1:] == [[(refused, 0), (waits, 0), (good, 0)], [(waits, 0)]]
    assert [(release.publication, release.local) for release in all_released(port, 1)] == [(refused, False)]


def test_a_call_without_an_answer_is_repeated_whole(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    numbers = [publish(port, block) for block in (2, 3)]
    calls.fail = lambda call: Unreachable("no answer", address="home") if call == 1 else None
    calls.go.set()
    until(lambda: len(calls.sent) == 3)
    assert calls.sent[1] == calls.sent[2] == [(number, 0) for number in numbers]
    assert port.released() == []


def test_a_step_that_waits_for_long_ends_no_other(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    port._session.patience = SOON
    long, short, good = (publish(port, block) for block in (2, 3, 4))
    answers: dict[tuple[int, int], KvferryError] = {
        (1, long): LimitReached("full", retry_after=60.0, limit="x", value=1),
        (1, short): HomeRecovering("not now", retry_after=0.01),
    }
    calls.change = lambda call, step: answers.get((call, step.publication))
    calls.go.set()
    # It is longer than it is tried for; the next one is tried again.
    assert [release.publication for release in all_released(port, 1)] == [long]
    until(lambda: len(calls.sent) == 3)
    assert calls.sent[1:] == [[(long, 0), (short, 0), (good, 0)], [(short, 0)]]


def test_a_waiting_step_holds_up_no_later_publication(port: SchedulerPort, calls: Calls) -> None:
    calls.go.set()
    waits = publish(port, 1, last=False)
    later, free = waits + 1, threading.Event()
    calls.change = lambda _, step: (
        HomeRecovering("not now", retry_after=1.0) if step.publication == later and not free.is_set() else None
    )
    publication = port.publish("waits", {"full": Blocks([2])}, last=False)
    port.publish_more(publication, {"full": Blocks([3], first_token=16)}, last=True)
    assert publication.number == later
    until(lambda: [(later, 0)] in calls.sent)
    others = [publish(port, block) for block in (4, 5)]
    # The first is not answered before these were.
    until(lambda: {(number, 0) for number in others} <= {sent for call in calls.sent for sent in call})
    free.set()
    until(lambda: [(later, 1)] in calls.sent)
    assert port.released() == []


def test_a_waiting_abort_holds_up_nothing(port: SchedulerPort, calls: Calls) -> None:
    calls.go.set()
    free = threading.Event()
    calls.refuse_abort = lambda _: None if free.is_set() else HomeRecovering("not now", retry_after=1.0)
    publication = port.publish("aborted", {"full": Blocks([1])})
    port.abort(publication)
    until(lambda: calls.aborts > 0)
    number = publish(port, 2)
    until(lambda: [(number, 0)] in calls.sent)
    assert not free.is_set()
    free.set()
    assert [release.publication for release in all_released(port, 1)] == [publication.number]


def test_a_call_that_fails_after_the_home_took_some_steps_frees_no_block(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    numbers = [publish(port, block) for block in (2, 3)]
    # A home looks again who the caller is whenever other calls have had their turn.
    calls.fail_after = lambda call: PeerRestarted("another incarnation") if call == 1 else None
    free = threading.Event()
    calls.refuse_abort = lambda _: None if free.is_set() else HomeRecovering("not now", retry_after=0.01)
    calls.go.set()
    until(lambda: calls.aborts > 0)
    # Readers may have leases on them.
    assert port.released() == []
    free.set()
    found = all_released(port, 2)
    assert sorted((release.publication, release.local) for release in found) == [(number, False) for number in numbers]


def test_each_call_of_a_large_step_has_its_own_timeout(port: SchedulerPort, calls: Calls, small_calls: int) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    numbers = [publish(port, block) for block in range(2, 3 + 2 * small_calls)]
    calls.go.set()
    until(lambda: sum(map(len, calls.sent)) == len(numbers) + 1)
    assert [len(call) for call in calls.sent] == [1, small_calls, small_calls, 1]
    assert [number for call in calls.sent[1:] for number, _ in call] == numbers
    assert set(calls.timeouts) == {CALL_TIMEOUT}


def test_the_rest_of_a_refused_publication_is_not_sent(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publication = port.publish("two steps", {"full": Blocks([2])}, last=False)
    port.publish_more(publication, {"full": Blocks([3], first_token=16)}, last=True)
    port.abort(publication)
    number = publication.number
    calls.change = lambda _, step: InvalidField("groups", "none", "some") if step.publication == number else None
    calls.go.set()
    found = all_released(port, 1)
    assert [(release.publication, release.local) for release in found] == [(number, False)]
    writes = port._session.block_use.writes()
    writes.begin("read", {"full": Blocks([2, 3]).ids})
    after = publish(port, 4)
    until(lambda: [(after, 0)] in calls.sent)
    assert calls.sent[1:3] == [[(number, 0), (number, 1)], [(after, 0)]]
    assert (port.released(), calls.aborts) == ([], 1)


def test_an_accepted_step_is_sent_or_refused_as_too_large(
    port: SchedulerPort, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("notifier", "publish"):
        monkeypatch.setattr(f"kvferry._control.{module}.SENT_NOTIFY_BYTES", 4000)
    publish(port, 1)
    assert calls.begun.wait(SOON)
    publication = port.publish("r" * 256, {"full": Blocks([2])}, last=False)
    offered, refused = [(publication.number, 0)], 0
    for size in range(3300, 4100, 5):
        try:
            offered.append((port.publish("request", {"full": Blocks([3])}, payload=bytes(size)).number, 0))
        except MessageTooLarge:
            refused += 1
    for size in range(4100, 3300, -5):
        try:
            port.publish_more(publication, {"full": Blocks([4], first_token=16)}, last=True, payload=bytes(size))
        except MessageTooLarge:
            continue
        offered.append((publication.number, 1))
        break
    assert 0 < refused < 160
    calls.go.set()
    until(lambda: sum(map(len, calls.sent)) == len(offered) + 1)
    assert sorted(sent for call in calls.sent[1:] for sent in call) == sorted(offered)
    assert port.released() == []


def test_waiting_steps_are_sent_before_the_port_is_closed(port: SchedulerPort, calls: Calls) -> None:
    publish(port, 1)
    assert calls.begun.wait(SOON)
    waits = publish(port, 2)
    calls.change = lambda call, step: (
        HomeRecovering("not now", retry_after=0.05) if (call, step.publication) == (1, waits) else None
    )
    calls.go.set()
    port.close(SOON)
    assert [(waits, 0)] == calls.sent[-1]
    assert len(calls.sent) == 3


@pytest.mark.slow
def test_waiting_steps_are_overtaken_no_more_than_a_home_allows(
    port: SchedulerPort, calls: Calls, small_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publication_sender.MAX_OVERTAKEN + BATCH <= MAX_SKIPPED
    monkeypatch.setattr(publication_sender, "MAX_OVERTAKEN", small_calls)
    monkeypatch.setattr("kvferry_server.domain.engine.MAX_SKIPPED", 2 * small_calls)
    publish(port, 1)
    assert calls.begun.wait(SOON)
    numbers = [publish(port, block) for block in range(2, 7 * small_calls)]
    waiting = set(numbers[: 5 * small_calls])

    def change(_: int, step: pb.Publish) -> KvferryError | None:
        # Long enough for all others to be sent in between.
        if step.publication not in waiting:
            return None
        waiting.remove(step.publication)
        return LimitReached("full", retry_after=1.0, limit="x", value=1)

    calls.change = change
    calls.go.set()
    until(lambda: sum(map(len, calls.sent)) == 1 + len(numbers) + 5 * small_calls)
    port.close(SOON)


@pytest.mark.parametrize("published", ["before", "meanwhile"])
def test_steps_without_an_answer_are_not_overtaken(
    port: SchedulerPort, calls: Calls, small_calls: int, published: str
) -> None:
    first = publish(port, 1)
    assert calls.begun.wait(SOON)
    numbers = [publish(port, block) for block in range(2, 2 + 2 * small_calls)] if published == "before" else []

    def fail(call: int) -> KvferryError | None:
        if call == 0 and published == "meanwhile":
            numbers.extend(publish(port, block) for block in range(2, 2 + 2 * small_calls))
        return Unreachable("no answer", address="home") if call < 3 else None

    calls.fail = fail
    calls.go.set()
    until(lambda: len({sent for call in calls.sent for sent in call}) == len(numbers) + 1)
    assert all(call[0] == (first, 0) for call in calls.sent[:4])
