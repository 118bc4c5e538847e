"""An engine whose prefix cache is asked, around vLLM's real cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvferry import MissReason, Prompt, PromptInput, Release, ReleaseOutcome, router_reference
from kvferry._control.questions import Question
from kvferry.engine import SchedulerPort
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.cached import Answers
from kvferry.integrations.vllm.sending import Sending
from kvferry.integrations.vllm.values import StepsDone
from kvferry.testing import Fabric
from tests.integrations.vllm.played_cache import BLOCK, Cache
from tests.integrations.vllm.played_port import Port

TEXT = range(100, 100 + 10 * BLOCK)


class AskedPort(Port):
    """A port with questions, and the blocks and misses that they are answered with."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Question] = []
        self.answers: dict[int, dict[str, Blocks]] = {}
        self.misses: dict[int, MissReason] = {}

    def questions(self) -> list[Question]:
        found, self.asked = self.asked, []
        return found

    def publish(self, request_id: str, blocks: Any, **more: Any) -> Any:
        published = super().publish(request_id, blocks, **more)
        self.answers[published.number] = blocks
        return published

    def miss(self, question: Question, reason: MissReason) -> None:
        self.misses[question.number] = reason


class Source(Cache):
    """An engine that is asked."""

    def __init__(self, fabric: Fabric, *specs: Any, **options: Any) -> None:
        super().__init__(fabric, *specs, **options)
        self.port = AskedPort()
        self.counts: list[str] = []
        port = cast(SchedulerPort, self.port)
        self.sending = Sending(self.setup, port, self.cache, [], self.counts.append)
        self.answers = Answers(self.setup, port, self.cache, self.sending.answer)
        self.step = 0
        self.number = 0

    def ask(
        self, tokens: Sequence[int], first_token: int = 0, adapter: str = "", inputs: Sequence[PromptInput] = ()
    ) -> Question:
        self.number += 1
        prompt = Prompt(list(tokens), adapter=adapter, inputs=inputs)
        question = Question(self.number, router_reference("h:1", "prefill"), prompt, first_token, "reader", 1e9)
        self.port.asked.append(question)
        return question

    def begin(self) -> bool:
        """Begin a step, and look up; whether there was a question."""
        self.step = self.sending.begin({})
        return self.answers.work()

    def ended(self, step: int) -> None:
        self.sending.computed({0: StepsDone(step, step)})

    def run(self) -> None:
        """Run a step to its end."""
        self.begin()
        self.ended(self.step)

    def answer(self, *asked: Any, **more: Any) -> dict[str, Blocks] | MissReason:
        """Ask, and run steps until there is an answer."""
        question = self.ask(*asked, **more)
        self.run()
        while self.answers.waiting or self.sending.waiting:
            self.run()
        if question.number in self.port.misses:
            return self.port.misses[question.number]
        return self.port.answers[self.port.number]

    def release(self, number: int) -> None:
        self.sending.released([Release(number, "", ReleaseOutcome.READ)])
