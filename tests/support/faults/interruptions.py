"""Load under faults: one process after another is killed, stopped or restarted while requests go on arriving."""

from __future__ import annotations

import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvferry._clock import now
from kvferry._reads.leased_reads import RANKS_GRACE
from tests.support.etcd import Etcd
from tests.support.faults.fault_world import World
from tests.support.faults.playing import nothing_left, parties
from tests.support.faults.processes import SOON, Node, Party
from tests.support.faults.scenario import SLACK, Target
from tests.support.faults.traffic import Ended, Traffic
from tests.support.waiting import PAUSE

PER_FAULT = 24
"""Requests that end from one fault to the next, at least: 29 faults in 700 requests."""
LASTS = (0.3, 2.0, 5.0, 22.0)
"""Seconds that a fault lasts: less and more than a lease and the engine ttl here; more than a ping takes."""
TIMEOUT = 40.0
"""Seconds of a read: more than a fault lasts, so that what ends a request earlier has another reason."""
RECOVERY = 60.0
"""Seconds after a fault's end in which a new request is served again."""
HUNG = TIMEOUT + RANKS_GRACE + max(LASTS) + SLACK
"""Seconds after which a request counts as hung: its own time, and that for which its reader may be stopped."""
DAY = 86_400
CLOCK = "unshare"
"""The program that gives a process another CLOCK_MONOTONIC."""

Play: TypeAlias = "Callable[[float], Iterator[None]]"
"""Plays a fault that lasts so many seconds, in steps."""


@dataclass
class Played:
    """A fault that was played.

    Attributes:
        name: what was done to whom.
        lasts: seconds for which it was done.
        began, ended: when; the end of a fault that goes on is `inf`.
    """

    name: str
    lasts: float
    began: float
    ended: float = float("inf")


@dataclass
class Storm:
    """Some faults under load, in a world that works; leaves a world that works.

    Attributes:
        world: where.
        draw: what is done to whom.
        count: number of faults.
        lasts: seconds that a fault may last.
        members: of the etcd cluster that is the world's directory; empty: it has none.
        played: the faults.
        traffic: the requests.
        recovered: seconds from the end of each fault until a later request had been served.
    """

    world: World
    draw: random.Random
    count: int
    lasts: Sequence[float] = LASTS
    members: Sequence[Etcd] = ()
    played: list[Played] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.world, self.draw, TIMEOUT)
        self._killed: set[Party] = set()

    def play(self) -> Iterator[None]:
        """All of it, in steps. Raises AssertionError: bytes are wrong, a request hangs, an engine ended by itself, or
        something was left."""
        self.world.sound = False
        for _ in self._faults():
            self._turn()
            yield
        self.traffic.arriving = False
        end = now() + HUNG
        while self.traffic.busy:
            assert now() < end, f"{self.traffic.under_way} requests hang; or their blocks stay pinned, or uncertain"
            self._turn()
            yield
        self.traffic.settle()
        for node in self.world.nodes:
            # Reads are served without the reader's.
            node.ready()
        nothing_left(self.world)
        self.world.sound = True

    def under(self, request: Ended) -> list[Played]:
        """The faults that were under way during a request."""
        return [fault for fault in self.played if fault.began < request.ended and request.began < fault.ended]

    def _turn(self) -> None:
        if not self.traffic.turn():
            threading.Event().wait(PAUSE)
        for engine in (self.world.source, self.world.reader):
            processes = engine.processes
            for process in processes:
                assert process.alive or process in self._killed, f"process {process.pid} of an engine ended by itself"
        oldest = min((reading.began for reading in self.traffic.reads.values()), default=now())
        assert now() - oldest < HUNG, "a request hangs"

    def _faults(self) -> Iterator[None]:
        for _ in range(self.count):
            so_far = len(self.traffic.ended)
            while len(self.traffic.ended) < so_far + PER_FAULT:
                yield
            name, fault = self.draw.choice(self._choices())
            lasts = self.draw.choice(self.lasts)
            self.played.append(played := Played(name, lasts, now()))
            yield from fault(lasts)
            played.ended = now()
            while not self._served_since(played.ended):
                assert now() < played.ended + RECOVERY, f"no request was served after {played.name}"
                yield
            self.recovered.append(now() - played.ended)

    def _served_since(self, then: float) -> bool:
        return any(not request.error and request.began > then for request in reversed(self.traffic.ended[-100:]))

    def _choices(self) -> list[tuple[str, Play]]:
        targets = [target for target in Target if target is not Target.RELAY or self.world.relay.started]
        found: list[tuple[str, Play]] = []
        for target in targets:
            found.append((f"SIGSTOP to {target.value}", partial(self._stop, target)))
            found.append((f"SIGKILL to {target.value}", partial(self._kill, target)))
            if target.restarts_alone:
                found.append((f"SIGTERM to {target.value}", partial(self._drain, target)))
        for count in (1, 2) if self.members else ():
            title = f"{count} of {len(self.members)} etcd members"
            found.append((f"SIGSTOP to {title}", partial(self._stop_members, count)))
            found.append((f"SIGKILL to {title}", partial(self._kill_members, count)))
        return found

    # What is done, in steps. The world works in the end.

    def _stop(self, target: Target, lasts: float) -> Iterator[None]:
        found = parties(self.world, target)
        for party in found:
            party.stop()
        yield from _pass(lasts)
        for party in found:
            party.resume()

    def _kill(self, target: Target, lasts: float) -> Iterator[None]:
        found = parties(self.world, target)
        self._killed.update(found)
        for party in found:
            party.kill()
        yield from _pass(lasts)
        yield from self._start(found)

    def _drain(self, target: Target, lasts: float) -> Iterator[None]:
        found = parties(self.world, target)
        for party in found:
            party.process.terminate()
        end = now() + SOON
        while any(party.alive for party in found):
            assert now() < end, f"{target.value} did not end"
            yield
        for party in found:
            assert party.process.returncode == 0, f"{target.value} ended with {party.process.returncode}"
        yield from _pass(lasts)
        yield from self._start(found)

    def _start(self, found: Sequence[Party]) -> Iterator[None]:
        """Start again what has ended, node servers with another clock."""
        for party in found:
            if isinstance(party, Node):
                party.kill()
                party.start(_clock(self.draw))
        if any(process in found for process in self.world.source.processes):
            self._killed.update(self.world.source.processes)
            yield from self.world.restarting_source()
        if self.world.reader.process in found:
            yield from self.world.spare.process.starting()
            self.world.replace_reader()

    def _stop_members(self, count: int, lasts: float) -> Iterator[None]:
        found = self.draw.sample(list(self.members), count)
        for member in found:
            member.signal(signal.SIGSTOP)
        yield from _pass(lasts)
        for member in found:
            member.signal(signal.SIGCONT)

    def _kill_members(self, count: int, lasts: float) -> Iterator[None]:
        found = self.draw.sample(list(self.members), count)
        for member in found:
            member.stop()
        yield from _pass(lasts)
        for member in found:
            member.launch()


def _pass(seconds: float) -> Iterator[None]:
    end = now() + seconds
    while now() < end:
        yield


def _clock(draw: random.Random) -> list[str]:
    """Prefix of the command line of a program that has another CLOCK_MONOTONIC, where the system has such clocks."""
    program = shutil.which(CLOCK)
    return [] if program is None else [program, "--time", "--monotonic", str(draw.randrange(DAY)), "--"]
