"""The questions of a home to its engine: each is returned once, however often the home sends it, and none after its
end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Blocks, MissReason, Prompt, PromptInput, Question
from kvferry._control.home_session import HomeSession
from kvferry._control.questions import (
    MAX_ASKED_TOKENS,
    MAX_INPUTS,
    MAX_OPEN,
    AskedPrefix,
    Questions,
    asked_end,
    prompt_from_proto,
    prompt_to_proto,
)
from kvferry.errors import BlocksShort, InvalidField, ServerDraining
from kvferry.geometry import Group, GroupKind
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.scripted import EPOCH, Scripted, opened, opened_session, scripted, synced
from tests.support.waiting import until

ANOTHER_EPOCH = b"f" * 16
OPENED = pb.WatchResponse(home_epoch=EPOCH, opened=pb.WatchOpened())
RESUMED = pb.WatchResponse(home_epoch=EPOCH, opened=pb.WatchOpened(resumed=True))
RESTARTED = pb.WatchResponse(home_epoch=ANOTHER_EPOCH, opened=pb.WatchOpened())
LAGGED = pb.WatchResponse(home_epoch=EPOCH, lagged=pb.WatchLagged(dropped=1))
SYNCED = synced()


class Clock:
    time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def questions(clock: Clock) -> Questions:
    return Questions(clock.now)


def asked(number: int, *, seconds: float = 2.0, token_ids: tuple[int, ...] = (1, 2, 3)) -> pb.WatchResponse:
    question = pb.Question(number=number, reference=f"kvf1.{number}", prompt=pb.Prompt(token_ids=token_ids))
    question.first_token, question.asker.engine_id = 1, "decode"
    question.remaining.FromNanoseconds(int(seconds * 1e9))
    return pb.WatchResponse(home_epoch=EPOCH, question=question)


def over(number: int) -> pb.WatchResponse:
    return pb.WatchResponse(home_epoch=EPOCH, question_ended=pb.QuestionEnded(number=number))


def tell(questions: Questions, *messages: pb.WatchResponse) -> list[int]:
    """Tell the events, and return the numbers of the questions that are new."""
    for message in messages:
        questions.on_event(message)
    return [question.number for question in questions.take()]


def test_a_question_has_what_its_asker_has_said(questions: Questions) -> None:
    heard: list[int] = []
    questions.heard.append(lambda: heard.append(1))
    questions.on_event(asked(7, seconds=1.5))
    (question,) = questions.take()
    assert (question.number, question.reference, question.asker) == (7, "kvf1.7", "decode")
    assert (question.prompt.token_ids.tolist(), question.first_token) == ([1, 2, 3], 1)
    assert (question.deadline, question.open, heard) == (101.5, True, [1])
    assert "kvf1" not in repr(question)


@pytest.mark.parametrize(
    "again",
    [
        (RESUMED, asked(2)),
        (OPENED, asked(1), asked(2), SYNCED),
        (LAGGED, asked(1), asked(2), SYNCED),
        (OPENED, asked(2), asked(1), SYNCED, RESUMED, asked(2)),
    ],
    ids=["resumed", "opened again", "lagged", "both"],
)
def test_a_question_is_returned_once_however_often_it_is_sent(
    questions: Questions, again: tuple[pb.WatchResponse, ...]
) -> None:
    assert tell(questions, OPENED, SYNCED, asked(1), asked(2)) == [1, 2]
    assert tell(questions, *again) == []
    assert tell(questions, asked(3)) == [3]


def test_a_question_that_was_never_returned_is_returned_once(questions: Questions) -> None:
    assert tell(questions, OPENED, asked(1), LAGGED, asked(1), SYNCED) == [1]
    assert tell(questions) == []


def test_a_question_that_has_ended_is_not_returned(questions: Questions) -> None:
    assert tell(questions, asked(1), asked(2), over(1), over(9)) == [2]
    assert tell(questions, asked(1)) == []


def test_a_question_is_open_until_the_home_says_that_it_has_ended(questions: Questions) -> None:
    questions.on_event(asked(1))
    (question,) = questions.take()
    questions.on_event(over(2))
    assert question.open
    questions.on_event(over(1))
    assert not question.open


def test_questions_that_are_missing_in_the_full_state_have_ended(questions: Questions) -> None:
    for message in (OPENED, SYNCED, asked(1), asked(2)):
        questions.on_event(message)
    first, second = questions.take()
    for message in (LAGGED, asked(2)):
        questions.on_event(message)
    assert (first.open, second.open) == (True, True)
    questions.on_event(SYNCED)
    assert (first.open, second.open) == (False, True)


def test_questions_of_a_home_that_has_restarted_have_ended_and_its_numbers_begin_again(questions: Questions) -> None:
    questions.on_event(OPENED)
    questions.on_event(asked(5))
    (before,) = questions.take()
    assert tell(questions, RESTARTED, asked(1), SYNCED) == [1]
    assert not before.open


def test_a_question_whose_time_is_over_is_not_returned(questions: Questions, clock: Clock) -> None:
    questions.on_event(asked(1, seconds=0.5))
    clock.time += 0.5
    assert questions.take() == []


def test_a_question_whose_time_is_over_has_ended_also_if_its_home_is_silent(questions: Questions, clock: Clock) -> None:
    questions.on_event(asked(1, seconds=0.5))
    (question,) = questions.take()
    clock.time += 0.4
    assert (questions.take(), question.open) == ([], True)
    clock.time += 0.1
    assert (questions.take(), question.open) == ([], False)


def test_questions_whose_ends_were_not_told_make_room_for_others(questions: Questions, clock: Clock) -> None:
    numbers = range(1, MAX_OPEN + 1)
    assert tell(questions, *map(asked, numbers), asked(MAX_OPEN + 1)) == [*numbers]
    clock.time += 3.0
    assert tell(questions, asked(MAX_OPEN + 2)) == [MAX_OPEN + 2]


def test_a_question_that_cannot_be_read_disturbs_no_other(
    questions: Questions, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = asked(1)
    wrong.question.prompt.inputs.add(offset=2**64 - 1)
    assert tell(questions, wrong, asked(2)) == [2]
    assert "cannot be read" in caplog.text


def test_questions_of_a_closed_session_have_ended(questions: Questions) -> None:
    questions.on_event(asked(1))
    (question,) = questions.take()
    questions.on_event(asked(2))
    questions.close()
    assert not question.open
    assert questions.take() == []


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Scripted, HomeSession]]:
    with scripted(tmp_path) as (server, control):

        def events(count: int) -> Iterator[pb.WatchResponse]:
            yield opened(resumed=count > 1)
            yield from ([synced()] if count == 1 else [])
            yield from (asked(1, seconds=60), asked(2, seconds=60))
            if count == 1:
                raise ServerDraining("the node server is draining")

        server.watch = events
        session = opened_session(control)
        yield server, session
        session.close()


def test_only_a_home_says_that_an_engine_has_not_answered(home: tuple[Scripted, HomeSession]) -> None:
    _, session = home
    found: list[Question] = []
    until(lambda: found.extend(session.questions(1.0)) or len(found) >= 2)  # type: ignore[func-returns-value]
    wrong: Any
    for wrong in (MissReason.NO_ANSWER, 1, "BUSY"):
        with pytest.raises(InvalidField):
            session.miss(found[0], wrong)
    wrong = 7
    with pytest.raises(InvalidField):
        session.miss(wrong, MissReason.BUSY)
    assert found[0].open


def missed(server: Scripted) -> list[pb.Miss]:
    return [told.miss for request in server.notified for told in request.notifications if told.HasField("miss")]


def test_questions_that_come_again_with_a_resumed_watch_are_returned_once(home: tuple[Scripted, HomeSession]) -> None:
    server, session = home
    found: list[Question] = []
    server.until(lambda: len(server.watched) > 1)
    until(lambda: found.extend(session.questions(1.0)) or len(found) >= 2)  # type: ignore[func-returns-value]
    assert [question.number for question in found] == [1, 2]
    assert session.questions() == []


def test_a_miss_is_told_once_and_in_the_engines_name(home: tuple[Scripted, HomeSession]) -> None:
    server, session = home
    found: list[Question] = []
    until(lambda: found.extend(session.questions(1.0)) or len(found) >= 2)  # type: ignore[func-returns-value]
    session.miss(found[0], MissReason.BUSY)
    session.miss(found[0], MissReason.NOT_CACHED)
    assert not found[0].open
    server.until(lambda: bool(missed(server)))
    (request,) = [request for request in server.notified if request.notifications[0].HasField("miss")]
    assert missed(server) == [pb.Miss(question=1, reason=pb.MISS_REASON_BUSY)]
    assert (request.sender.engine_id, request.session_secret) == ("engine", session.token.session_secret)


def test_a_closed_session_has_no_questions_and_misses_none(home: tuple[Scripted, HomeSession]) -> None:
    server, session = home
    (first, *_) = session.questions(30.0)
    session.close()
    assert not first.open
    assert session.questions(30.0) == []
    session.miss(first, MissReason.BUSY)
    assert missed(server) == []


IMAGE = PromptInput(4, 2, "hash")


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt([7]),
        Prompt([0, 2**32 - 1, 5], adapter="lora"),
        Prompt(range(1, 200), inputs=[IMAGE, PromptInput(50, 100, "b" * 256)]),
        Prompt([9] * 40_000),
    ],
    ids=["one token", "extremes", "inputs", "long"],
)
def test_prompts_arrive_as_they_were_asked_for(prompt: Prompt) -> None:
    message = pb.Prompt.FromString(prompt_to_proto(prompt, len(prompt)).SerializeToString())
    assert list(message.token_ids) == prompt.token_ids.tolist()
    found = prompt_from_proto(message)
    assert found.digest(len(prompt)) == prompt.digest(len(prompt))
    assert (found.adapter, found.inputs) == (prompt.adapter, prompt.inputs)


def test_the_beginning_of_a_prompt_has_the_inputs_that_begin_in_it() -> None:
    prompt = Prompt(range(10), inputs=[IMAGE, PromptInput(6, 1, "later")])
    found = prompt_from_proto(prompt_to_proto(prompt, 5))
    assert (len(found), found.inputs) == (5, (IMAGE,))
    assert found.digest(5) == prompt.digest(5)


def test_prompts_are_asked_for_as_far_as_they_are_known_and_fit_into_a_question() -> None:
    assert asked_end(Prompt.unknown) == 0
    assert asked_end(Prompt(range(10), inputs=[IMAGE])) == 10
    assert asked_end(Prompt(range(10), inputs=[PromptInput(4, 2)])) == 4
    assert asked_end(Prompt(range(10), inputs=[PromptInput(3, 2, "b" * 257)])) == 3
    assert asked_end(Prompt(range(400), inputs=[PromptInput(at, 1, "x") for at in range(300)])) == MAX_INPUTS
    assert asked_end(Prompt([1] * (MAX_ASKED_TOKENS + 1))) == MAX_ASKED_TOKENS


FULL, WINDOW = Group("full", block_tokens=4, num_blocks=8), Group("w", GroupKind.WINDOW, 4, 8, window_tokens=4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": Prompt.unknown}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"first_token": 8}, "first_token"),
        ({"first_token": -1}, "first_token"),
        ({"wait": 0}, "wait"),
        ({"wait": 2.1}, "wait"),
        ({"engine": b"kvf1e."}, "engine"),
    ],
)
def test_what_no_home_would_take_is_refused_at_once(wrong: dict[str, object], field: str) -> None:
    right = {"engine": "kvf1e.x", "prompt": Prompt(range(8)), "first_token": 0, "wait": 2.0}
    with pytest.raises(InvalidField) as found:
        AskedPrefix(groups=(FULL,), **{**right, **wrong})  # type: ignore[arg-type]
    assert found.value.values["field"] == field


@pytest.mark.parametrize(
    ("blocks", "complete", "good"),
    [
        (Blocks([1, 2], end_token=8), True, True),
        (Blocks([2], first_token=4, end_token=5), True, True),
        (Blocks([2], first_token=5, end_token=8), True, False),
        (Blocks([1], end_token=4), True, False),
        (Blocks([1], end_token=4), False, True),
        (Blocks([2], first_token=5, end_token=8), False, False),
        (None, True, False),
    ],
)
def test_an_answer_begins_at_or_before_the_first_token_and_ends_behind_it(
    blocks: Blocks | None, complete: bool, good: bool
) -> None:
    asked_prefix = AskedPrefix("kvf1e.x", Prompt(range(8)), 4, 1.0, (FULL, WINDOW))
    # Of a window, the source has its last blocks only.
    answer = {"w": Blocks([3], first_token=6, end_token=8)} | ({"full": blocks} if blocks is not None else {})
    if good:
        asked_prefix.check(answer, complete=complete)
        return
    with pytest.raises(BlocksShort):
        asked_prefix.check(answer, complete=complete)
