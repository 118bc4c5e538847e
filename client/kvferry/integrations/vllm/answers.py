"""Answers the questions of other engines for the KV of a prompt's beginning."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvferry import MissReason, Publication, Question, Release
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError
from kvferry.integrations.vllm.cached import Hit, Lookup, PrefixCache
from kvferry.integrations.vllm.outgoing import BlockHold, ids_of
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import Summed

logger = logging.getLogger(__name__)

MOST_HASHED = 8192
"""Tokens after which a step leaves further questions to the next one."""

LEAST_COST = 256
"""Tokens for which a question counts at least."""


@dataclass(slots=True, eq=False)
class _Answer:
    """Blocks that are held for a question, and published when every rank has ended `step`."""

    question: Question
    hit: Hit
    held: BlockHold
    step: int
    publication: Publication | None = None


class Answers:
    """Answers questions from vLLM's prefix cache, a bounded number in each step.

    The blocks of an answer are held as a request would hold them, until the release of the publication. vLLM takes
    blocks for its prefix cache when it schedules the step that computes them, so an answer is published when that step
    has ended on every rank.

    `count` adds to a count by its name, see `KvferryStats`.
    """

    def __init__(self, setup: Setup, port: SchedulerPort, count: Callable[[str], None]) -> None:
        self._setup = setup
        self._port = port
        self._count = count
        self._cache: PrefixCache | None = None
        self._most = 0
        self._step = 0
        self._ended = 0
        self._open: deque[tuple[Question, Lookup]] = deque()
        self._found: deque[_Answer] = deque()
        self._published: dict[int, _Answer] = {}
        """By the numbers of their publications."""
        self._holders: Counter[int] = Counter()
        """How many answers hold each block: of one prompt, and of one beginning, there may be thousands."""
        self._sums: list[Summed] = []

    def bind(self, cache: PrefixCache) -> None:
        """Take vLLM's prefix cache. Without it, every question is a miss."""
        if self._setup.serves and self._setup.caches_prefixes:
            self._cache = cache
            self._most = int(cache.pool.num_gpu_blocks * self._setup.settings.prefix_share)

    def see(self, request: Any) -> None:
        """Remember the LoRA adapter of an arrived request."""
        if self._cache is not None:
            self._cache.see(request)

    @property
    def possible(self) -> bool:
        """Whether this engine can answer with anything but a miss."""
        return self._most > 0

    @property
    def waiting(self) -> bool:
        """Whether vLLM must run steps for answers."""
        return bool(self._open or self._found)

    @property
    def unsummed(self) -> bool:
        """Whether the next step has published blocks to sum."""
        return bool(self._sums)

    @property
    def holding(self) -> bool:
        return bool(self._published)

    def begin(self, step: int) -> bool:
        """Begin a step, after vLLM has scheduled it: see `work`."""
        self._step = step
        return self.work()

    def work(self) -> bool:
        """Look up what the new questions ask for, a bounded part of it; return whether there was a question."""
        questions = self._port.questions()
        if questions:
            # Ended ones must not wait for their turn: each may have 1 MiB.
            self._open = deque(waiting for waiting in self._open if waiting[0].open)
        for question in questions:
            lookup = None if self._cache is None else self._cache.lookup(question.prompt)
            if lookup is None:
                self._port.miss(question, MissReason.UNSUPPORTED)
            else:
                self._open.append((question, lookup))
        left = MOST_HASHED
        while self._open and left > 0 and self._cache is not None:
            question, lookup = self._open[0]
            if question.open:
                left -= max(LEAST_COST, self._cache.hash(lookup))
                if not lookup.known:
                    continue
                self._answer(self._cache, question, lookup)
            self._open.popleft()
        return bool(questions)

    def computed(self, ended: int) -> None:
        """Publish the answers whose step has ended on every rank; `ended` is the last such step."""
        self._ended = ended
        while self._found and self._found[0].step <= ended:
            answer = self._found.popleft()
            if not answer.question.open:
                self._free(answer)
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
                self._free(answer)
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
            self._free(answer)
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
                self._free(answer)
        return others

    def take_sums(self) -> list[Summed]:
        """Return the blocks that were published since the last call, if integrity mode sums them."""
        found, self._sums = self._sums, []
        return found

    # Internal.

    def _answer(self, cache: PrefixCache, question: Question, lookup: Lookup) -> None:
        hit = cache.find(lookup, question.first_token)
        if hit is None:
            self._port.miss(question, MissReason.NOT_CACHED)
            return
        ids = ids_of(hit.blocks)
        if len(self._holders) + sum(block not in self._holders for block in set(ids)) > self._most:
            self._port.miss(question, MissReason.BUSY)
            return
        held = BlockHold(cache.pool)
        held.add(hit.blocks)
        self._holders.update(ids)
        self._found.append(_Answer(question, hit, held, self._step))
        self.computed(self._ended)

    def _free(self, answer: _Answer) -> None:
        """Free the blocks of an answer."""
        answer.held.free()
        for block in ids_of(answer.hit.blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
