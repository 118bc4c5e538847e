"""Answers the questions of other engines for the KV of a prompt's beginning."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry import MissReason, Publication, Question, Release
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError
from kvferry.integrations.vllm.cached import Hit, Lookup, PrefixCache
from kvferry.integrations.vllm.outgoing import BlockHolds, ids_of
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import Summed

logger = logging.getLogger(__name__)

MOST_HASHED = 8192
"""Tokens after which a step leaves further questions to the next one."""

LEAST_COST = 256
"""Tokens for which a question counts at least."""


@dataclass(slots=True, eq=False)
class _Asked:
    """An open question; its prompt is copied when it is its turn."""

    question: Question
    lookup: Lookup | None = None


@dataclass(slots=True, eq=False)
class _Answer:
    """Blocks that are held for a question, and published when every rank has ended `step`. `ids` are of all groups."""

    question: Question
    hit: Hit
    ids: npt.NDArray[np.int64]
    step: int
    publication: Publication | None = None


class Answers:
    """Answers questions from vLLM's prefix cache, a bounded number in each step.

    The blocks of an answer are held as a request would hold them, until the release of the publication. vLLM takes
    blocks for its prefix cache when it schedules the step that computes them, so an answer is published when that step
    has ended on every rank.

    `sums` gets the published blocks that integrity mode sums; `count` adds to a count by its name, see `KvferryStats`.
    """

    def __init__(
        self,
        setup: Setup,
        port: SchedulerPort,
        cache: PrefixCache,
        sums: list[Summed],
        count: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._port = port
        self._cache = cache
        self._sums = sums
        self._count = count
        self._holds = BlockHolds(cache.pool)
        share = setup.settings.prefix_share if setup.serves and setup.caches_prefixes else 0
        self._most = int(cache.pool.num_gpu_blocks * share)
        self._step = 0
        self._ended = 0
        self._open: deque[_Asked] = deque()
        self._found: deque[_Answer] = deque()
        self._published: dict[int, _Answer] = {}
        """By the numbers of their publications."""

    @property
    def possible(self) -> bool:
        """Whether this engine can answer with anything but a miss."""
        return self._most > 0

    @property
    def waiting(self) -> bool:
        """Whether vLLM must run steps for answers."""
        return bool(self._open or self._found)

    @property
    def holding(self) -> bool:
        return bool(self._published)

    def begin(self, step: int, *, refuses: bool = False) -> bool:
        """Begin a step, after vLLM has scheduled it: see `work`."""
        self._step = step
        return self.work(refuses=refuses)

    def work(self, *, refuses: bool = False) -> bool:
        """Look up what the new questions ask for, a bounded part of it; return whether there was a question.
        `refuses`: the engine is paused, so that nothing more is held."""
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

    def computed(self, ended: int) -> None:
        """Publish the answers whose step has ended on every rank; `ended` is the last such step."""
        self._ended = ended
        while self._found and self._found[0].step <= ended:
            answer = self._found.popleft()
            if not answer.question.open:
                self._holds.drop(answer.ids)
                continue
            try:
                publication = self._port.publish(
                    f"prefix-{answer.question.number}",
                    answer.hit.blocks,
                    checksums=self._setup.sums,
                    reference=answer.question.reference,
                    prompt=answer.question.prompt,
                )
            except KvferryError as error:
                self._holds.drop(answer.ids)
                logger.info("question %d could not be answered: %s", answer.question.number, error)
                continue
            answer.publication = publication
            self._published[publication.number] = answer
            self._count("prefixes_published")
            if self._setup.sums:
                self._sums.append(Summed(publication.number, answer.hit.blocks))

    def lost(self, blocks: Iterable[int]) -> None:
        """Withdraw answers that were computed from blocks into which another connector could not load."""
        bad = set(blocks)
        for answer in [answer for answer in self._found if bad & answer.hit.computed_from]:
            self._found.remove(answer)
            self._holds.drop(answer.ids)
            self._port.miss(answer.question, MissReason.NOT_CACHED)
        for answer in self._published.values():
            if answer.publication is not None and bad & answer.hit.computed_from:
                # If the session has ended, so has the publication.
                with suppress(KvferryError):
                    self._port.abort(answer.publication)

    def released(self, releases: Iterable[Release]) -> list[Release]:
        """Free the blocks of released answers; return the releases of other publications."""
        others = []
        for release in releases:
            answer = self._published.pop(release.publication, None)
            if answer is None:
                others.append(release)
            else:
                self._holds.drop(answer.ids)
        return others

    # Internal.

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
            self._answer(question, cache.find(asked.lookup, question.first_token))
        return max(LEAST_COST, hashed)

    def _answer(self, question: Question, hit: Hit | None) -> None:
        if hit is None:
            self._port.miss(question, MissReason.NOT_CACHED)
            return
        ids = np.array(ids_of(hit.blocks), np.int64)
        if self._holds.with_more(ids) > self._most:
            self._port.miss(question, MissReason.BUSY)
            return
        self._holds.add(ids)
        self._found.append(_Answer(question, hit, ids, self._step))
        self.computed(self._ended)
