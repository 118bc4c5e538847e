"""Questions (PROTOCOL, Asking for a prefix): what an engine asks another one, and what its own home asks an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry import _arguments as arguments
from kvferry._clock import from_duration, to_duration
from kvferry._directory.directory import Listing
from kvferry._logs import Log
from kvferry._prompt import Prompt, PromptInput
from kvferry._threads import guarded
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

ANSWER_WAIT = 0.2
"""Default seconds for the answer of the engine that is asked."""

MAX_WAIT = 2.0
"""Most seconds for which a home waits for an engine's answer; the contract's limit."""

MAX_OPEN = 64
"""Most open questions of a home to one engine; the contract's limit."""

MAX_ASKED_TOKENS = 235_000
"""Most tokens of a question's prompt: with inputs and references, they fit into a notification of 1 MiB."""

MAX_INPUTS = 256
MAX_IDENTIFIER = 256
"""Most inputs of a question's prompt, and most bytes of the identifier of an input; the contract's limits."""

_TOKEN_IDS = bytes([pb.Prompt.TOKEN_IDS_FIELD_NUMBER << 3 | 2])
"""What comes before the length of the token ids in an encoded prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrefix:
    """The prefix of a prompt that this engine, which has these groups, asks another one for; see
    `SchedulerPort.ask`."""

    engine: str | Listing = field(repr=False)
    prompt: Prompt
    first_token: int
    wait: float
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Listing):
            arguments.text("engine", self.engine)
        end = asked_end(arguments.instance("prompt", self.prompt, Prompt, "a Prompt"))
        if not end:
            raise InvalidField("prompt", repr(self.prompt), "one whose first tokens are known")
        # Python's own numbers, see `arguments`.
        object.__setattr__(self, "first_token", arguments.integer("first_token", self.first_token, 0, end - 1))
        object.__setattr__(self, "wait", arguments.seconds("wait", self.wait))
        if self.wait > MAX_WAIT:
            raise InvalidField("wait", self.wait, f"at most {MAX_WAIT:g} seconds")

    def message(self, reference: str, wait: float) -> pb.Notification:
        """Make the notification that asks, under a reference made for this."""
        return pb.Notification(
            ask=pb.Ask(
                reference=reference,
                engine_reference="" if isinstance(self.engine, Listing) else self.engine,
                prompt=prompt_to_proto(self.prompt, asked_end(self.prompt)),
                first_token=self.first_token,
                wait=to_duration(wait),
            )
        )

    def check(self, blocks: Mapping[str, Blocks], *, complete: bool) -> None:
        """Raise `BlocksShort` if the answer has not what was asked for: blocks of which some begin at or before the
        first token, and, once all are known, all end behind it."""
        # Of a window and of a state, the source has what the end of its blocks needs. To some engines, windows are
        # groups of tokens whose tables begin late.
        found = {group.name: blocks.get(group.name) for group in self.groups if group.kind is GroupKind.TOKENS}
        begin = min((0 if listed is None else listed.first_token for listed in found.values()), default=0)
        for name, listed in found.items():
            end = 0 if listed is None else listed.end_token or 0
            if begin > self.first_token or (complete and end <= self.first_token):
                raise BlocksShort(name, "source", f"tokens from {self.first_token}", f"tokens [{begin}, {end})")


@dataclass(slots=True, eq=False)
class Question:
    """Asks an engine for what it has cached of a prompt. The answer is a publication of the longest prefix that the
    engine has behind `first_token`: ``publish(request_id, blocks, reference=question.reference,
    prompt=question.prompt)``; or `SchedulerPort.miss`.

    Attributes:
        number: number of the question; rising.
        reference: to publish under. A capability.
        prompt: the prompt, `Prompt.token_ids` among it.
        first_token: what lies before it, the asker has itself. The blocks of groups of kind TOKENS begin at or before
            it.
        asker: engine_id of the engine that asks.
        deadline: when an answer is too late, in seconds on the clock ``time.CLOCK_BOOTTIME``.
        open: whether the question waits for an answer, as of the last call of `questions`. An answer to one that has
            ended does no harm: its publication is released at once.
    """

    number: int
    reference: str = field(repr=False)
    prompt: Prompt
    first_token: int
    asker: str
    deadline: float
    open: bool = True


class Questions:
    """The open questions of a home to its engine. Each is returned once, however often the home sends it. Thread-safe.
    `heard` are called, on the client's event loop, for each new question."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.heard: list[Callable[[], object]] = []
        self._now = now
        self._lock = threading.Lock()
        self._epoch = b""
        """The start of the home that the numbers are of."""
        self._highest = 0
        self._open: dict[int, Question] = {}
        self._taken = 0
        """The highest number that `take` has returned."""
        self._repeated: set[int] | None = None
        """Numbers in the full state that is being received; None: there is none."""

    def take(self) -> list[Question]:
        """Return the questions since the last call that are still open."""
        if not self._open:
            # Without the lock: an engine asks in each step.
            return []
        with self._lock:
            self._end_late()
            found = [question for number, question in self._open.items() if number > self._taken]
            self._taken = max(self._open, default=self._taken)
        return found

    def on_event(self, message: pb.WatchResponse) -> None:
        """Take an event of the Watch; those of other kinds change nothing."""
        kind = message.WhichOneof("event")
        if kind == "question":
            self._asked(message.question)
            return
        with self._lock:
            if kind == "question_ended":
                self._end(message.question_ended.number)
            elif kind == "opened" and message.home_epoch != self._epoch:
                self._end_all()
                self._epoch, self._highest, self._taken = message.home_epoch, 0, 0
            if kind in ("opened", "lagged"):
                self._repeated = None if message.opened.resumed else set()
            elif kind == "synced" and self._repeated is not None:
                for number in self._open.keys() - self._repeated:
                    self._end(number)
                self._repeated = None

    def end(self, question: Question) -> bool:
        """End a question that is about to be answered with a miss; returns whether it was open."""
        with self._lock:
            return self._open.get(question.number) is question and self._end(question.number)

    def close(self) -> None:
        with self._lock:
            self._end_all()

    def _asked(self, message: pb.Question) -> None:
        number = message.number
        with self._lock:
            if self._repeated is not None:
                self._repeated.add(number)
            self._end_late()
            if number <= self._highest or len(self._open) >= MAX_OPEN:
                return
            self._highest = number
        deadline = self._now() + from_duration(message.remaining)
        try:
            prompt = prompt_from_proto(message.prompt)
        except InvalidField as error:
            # Raised to the Watch, it would make the home send the question again.
            logger.warning("a question of engine %s cannot be read: %s", message.asker.engine_id, error)
            return
        asker = message.asker.engine_id
        question = Question(number, message.reference, prompt, message.first_token, asker, deadline)
        with self._lock:
            self._open[number] = question
        for heard in self.heard:
            guarded(heard, "a function that is called for each question")

    def _end_late(self) -> None:
        """End the questions whose time is over: their home may be away, and does not tell a slow Watch of all ends."""
        time = self._now()
        for number in [number for number, question in self._open.items() if question.deadline <= time]:
            self._end(number)

    def _end(self, number: int) -> bool:
        question = self._open.pop(number, None)
        if question is None:
            return False
        question.open = False
        return True

    def _end_all(self) -> None:
        for number in tuple(self._open):
            self._end(number)


def asked_end(prompt: Prompt) -> int:
    """Return how many tokens of a prompt an engine can be asked for: those that are known, and fit into a question."""
    left_out = [
        each.offset
        for index, each in enumerate(prompt.inputs)
        if index >= MAX_INPUTS or len(each.identifier.encode()) > MAX_IDENTIFIER
    ]
    return min(prompt.known, MAX_ASKED_TOKENS, *left_out)


def prompt_to_proto(prompt: Prompt, end: int) -> pb.Prompt:
    """Encode the first `end` tokens of a prompt, which are copied as a whole: there may be hundreds of thousands; and
    the inputs that begin before."""
    words = prompt.token_ids[:end].tobytes()
    message = pb.Prompt.FromString(_TOKEN_IDS + _varint(len(words)) + words)
    message.adapter = prompt.adapter
    for each in prompt.inputs:
        if each.offset < end:
            message.inputs.add(offset=each.offset, length=each.length, identifier=each.identifier)
    return message


def prompt_from_proto(message: pb.Prompt) -> Prompt:
    """Decode a prompt; raises `InvalidField`, see `Prompt`."""
    inputs = [PromptInput(each.offset, each.length, each.identifier) for each in message.inputs]
    return Prompt(np.array(message.token_ids, np.uint32), adapter=message.adapter, inputs=inputs)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
