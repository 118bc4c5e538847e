"""Requests that arrive all the time, through the ports of both engines, whatever happens to the processes meanwhile.

One thread does everything and waits for no process, since any of them may be stopped or gone.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvferry._clock import now
from kvferry.errors import BadReference, DataLoss, DirectoryUnavailable, InternalError, PromptMismatch
from tests.support.faults.fault_engines import Reader, Reading, Request, Source
from tests.support.faults.fault_world import World
from tests.support.faults.processes import EngineProcess
from tests.support.faults.reports import Seen, Stepped

AT_ONCE = 8
"""Requests that are on their way at once."""
SMALLEST, LARGEST = 1, 24
"""Blocks of a request."""
NEVER = (InternalError, DataLoss, PromptMismatch, BadReference, DirectoryUnavailable)
"""Errors with which no request may end, whatever fails: nobody changes or confuses references here, and a directory's
last answer stays."""


class Mail:
    """What is told to a process, one thing at a time, by somebody who does not wait for its answer."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.idle = True

    def send(self, command: str, *arguments: Any) -> None:
        """Begin something there."""
        self.process.send(command, *arguments)
        self.idle = False

    def answer(self) -> Any:
        """The answer, once; None: it has not answered yet."""
        if self.idle or not self.process.answers(0.0):
            return None
        self.idle = True
        return self.process.answer()


@dataclass(frozen=True)
class Ended:
    """How a request ended.

    Attributes:
        began, ended: when its reader was asked for it, and when the reader had said how it ended.
        error: why it gave no bytes; None: its bytes were right.
    """

    began: float
    ended: float
    error: Exception | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass
class Traffic:
    """The requests of one world, from the first `turn` on.

    Attributes:
        world: whose engines publish and read.
        timeout: seconds that a read may take.
        arriving: whether new requests come.
        ended: those that have ended, in their order.
        reads: those under way, by name.
        outcomes: number of requests by how they ended.
    """

    world: World
    draw: random.Random
    timeout: float
    arriving: bool = True
    ended: list[Ended] = field(default_factory=list)
    reads: dict[str, Reading] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._names = (f"load-{number}" for number in itertools.count())
        self._published: list[Request] = []
        self._uncertain: dict[str, Reading] = {}
        self._meet()

    def turn(self) -> bool:
        """Pass on what there is; whether anything came."""
        if self.world.source is not self._source or self.world.reader is not self._reader:
            self._meet()
        source = self._source.scheduler.alive and self._hear_source()
        reader = self._reader.process.alive and self._hear_reader()
        return source or reader

    @property
    def under_way(self) -> int:
        """Requests that were published, or are about to be, and have not ended."""
        return len(self._offered) + len(self._published) + len(self.reads)

    def settle(self) -> None:
        """Take the last answers, so that others may talk to the processes."""
        for mail in (self._to_source, self._to_reader):
            stepped = None if mail.idle else mail.process.answer()
            assert not stepped or not (stepped.released or stepped.ended), "more came than there was"

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or may still be written to, or is still pinned."""
        pinned = any(not request.releases for request in self._source.requests.values())
        return bool(self.under_way or self._uncertain or pinned)

    def _meet(self) -> None:
        """The engines as they are now: some may have taken the place of others, with which their requests went."""
        if not hasattr(self, "_source") or self.world.source is not self._source:
            self._source: Source = self.world.source
            self._to_source = Mail(self._source.scheduler)
            self._offered: list[Request] = []
        if not hasattr(self, "_reader") or self.world.reader is not self._reader:
            # By the next reader, with the same reference.
            self._published += [reading.request for reading in self.reads.values()]
            self.outcomes["with their reader"] += len(self.reads)
            self.reads, self._uncertain = {}, {}
            self._reader: Reader = self.world.reader
            self._to_reader = Mail(self._reader.process)

    def _hear_source(self) -> bool:
        stepped: Stepped | None = self._to_source.answer()
        if stepped is not None:
            for request, publication in zip(self._offered, stepped.published, strict=True):
                self._source.published(request, publication)
                self._published.append(request)
            self._offered = []
            for release in stepped.released:
                request = self._source.hear(release)
                assert len(request.releases) == 1, "it was released twice"
        if self._to_source.idle:
            while self.arriving and self.under_way < AT_ONCE:
                blocks = min(self.draw.randint(SMALLEST, LARGEST), len(self._source.free()))
                if not blocks:
                    break
                self._offered.append(self._source.compute(blocks))
            offered = [(next(self._names), request.ids, request.tokens) for request in self._offered]
            self._to_source.send("step", offered, [])
        return stepped is not None and bool(stepped.published or stepped.released)

    def _hear_reader(self) -> bool:
        stepped: Stepped | None = self._to_reader.answer()
        if stepped is not None:
            for name, seen in stepped.ended.items():
                self._uncertain[name] = reading = self.reads.pop(name)
                self._end(reading, seen)
            for name in stepped.quiet:
                self._reader.free(self._uncertain.pop(name))
        if self._to_reader.idle:
            asked = []
            while self._published and (ids := self._reader.take(len(self._published[0].ids))):
                request, name = self._published.pop(0), next(self._names)
                self.reads[name] = Reading(self._reader, request, ids, 0, now())
                asked.append((name, request.publication.reference, ids, request.tokens, self.timeout))
            self._to_reader.send("step", [], asked)
        return stepped is not None and bool(stepped.ended or stepped.quiet)

    def _end(self, reading: Reading, seen: Seen) -> None:
        error = seen.error
        assert not isinstance(error, NEVER), repr(error)
        if error is None:
            assert self._reader.good(reading), "wrong bytes were handed over as good"
            self._reader.expect(reading)
        self.ended.append(Ended(reading.began, now(), error))
        good = "right bytes" if seen.confirmed else "right bytes, unconfirmed"
        self.outcomes[good if error is None else type(error).__name__] += 1
