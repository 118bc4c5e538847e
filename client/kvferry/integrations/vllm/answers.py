"""Answers the questions of other engines for the KV of a prompt's beginning."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry import MissReason, Question
from kvferry.engine import SchedulerPort
from kvferry.integrations.vllm.cached import Lookup, PrefixCache
from kvferry.integrations.vllm.sending import Sending
from kvferry.integrations.vllm.setup import Setup

MOST_HASHED = 8192
"""Tokens after which a step leaves further questions to the next one."""

LEAST_COST = 256
"""Tokens for which a question counts at least."""


@dataclass(slots=True, eq=False)
class _Asked:
    """An open question; its prompt is copied when it is its turn."""

    question: Question
    lookup: Lookup | None = None


class Answers:
    """Answers questions from vLLM's prefix cache, a bounded number in each step. `sending` publishes what is found."""

    def __init__(self, setup: Setup, port: SchedulerPort, cache: PrefixCache, sending: Sending) -> None:
        self._port = port
        self._cache = cache
        self._sending = sending
        share = setup.settings.prefix_share if setup.serves and setup.caches_prefixes else 0
        self._most = int(cache.pool.num_gpu_blocks * share)
        self._open: deque[_Asked] = deque()

    @property
    def possible(self) -> bool:
        """Whether this engine can answer with anything but a miss."""
        return self._most > 0

    @property
    def waiting(self) -> bool:
        """Whether vLLM must run steps for questions."""
        return bool(self._open)

    def work(self, *, refuses: bool = False) -> bool:
        """Look up what the new questions ask for, a bounded part of it; return whether there was a question. Called
        after vLLM has scheduled a step. `refuses`: the engine is paused, so that nothing more is held."""
        questions = self._port.questions()
        if questions:
            # Ended ones must not wait for their turn: each may have 1 MiB.
            self._open = deque(asked for asked in self._open if asked.question.open)
            self._open += map(_Asked, questions)
        if refuses:
            while self._open:
                self._port.miss(self._open.popleft().question, MissReason.BUSY)
        left = MOST_HASHED
        while self._open and left > 0:
            asked = self._open[0]
            if asked.question.open:
                left -= self._look_up(asked)
                if asked.lookup is not None and not asked.lookup.known:
                    continue
            self._open.popleft()
        return bool(questions)

    def _look_up(self, asked: _Asked) -> int:
        """Look up the next chunk of a prompt, and answer if it is the last; return for how many tokens it counts."""
        cache, question = self._cache, asked.question
        if self.possible and asked.lookup is None:
            asked.lookup = cache.lookup(question.prompt)
        if asked.lookup is None:
            self._port.miss(question, MissReason.UNSUPPORTED)
            return LEAST_COST
        hashed = cache.hash(asked.lookup)
        if asked.lookup.known:
            hit = cache.find(asked.lookup, question.first_token)
            if hit is None:
                self._port.miss(question, MissReason.NOT_CACHED)
            elif not self._sending.answer(question, hit, self._most):
                self._port.miss(question, MissReason.BUSY)
        return max(LEAST_COST, hashed)
