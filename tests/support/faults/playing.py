"""Plays a scenario and judges what each side saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvferry.errors import EngineNotListed, KvferryError, PeerRestarted, TransferExpired
from tests.support.faults.fault_engines import Reading, Request
from tests.support.faults.fault_world import World
from tests.support.faults.processes import SOON, EngineProcess, Node, Party
from tests.support.faults.reports import Seen
from tests.support.faults.scenario import Expected, Fate, Fault, Good, Moment, Scenario, Target, Until, seconds
from tests.support.faults.scenarios import GONE, LEASED_IN_TIME
from tests.support.waiting import until

PATIENT = 60.0
"""Seconds that a read may take which is expected to end by itself."""


def play(world: World, scenario: Scenario) -> None:
    """One scenario, from a world that works to a world that works."""
    world.sound = False
    expected = scenario.expected
    request, reading = _begin(world, scenario)
    if scenario.until is Until.AT_ONCE:
        _restore(world, scenario)
    if scenario.until is Until.RELEASE:
        judge_release(world, request, expected)
        _restore(world, scenario)
    if reading is not None:
        expected = _judge_read(world, reading, scenario)
    if scenario.until is Until.END:
        _restore(world, scenario)
    if reading is not None and reading.reader is world.reader:
        assert reading.wait_quiet(SOON), "the destination's blocks never became quiet"
    if expected.fate is Fate.READ_AGAIN:
        # A source that has waited for its home for long may come back after an engine ttl as short as this world's.
        until(lambda: world.source.engine_id in world.home.engines())
        serve(world, request)
    if expected.source:
        judge_release(world, request, expected)
    if scenario.fault is Fault.KILLED and scenario.target in (Target.SOURCE_RANK, Target.SOURCE_ENGINE):
        # Not before: the scheduler that lived on had a release to hear.
        world.restart_source()
    if expected.fate is Fate.RECOMPUTED:
        refused(world, request)
    works(world)
    nothing_left(world)
    world.sound = True


def _read(world: World, request: Request, timeout: float = PATIENT) -> Reading:
    """Begin a read, once the reader finds the source's home in the directory: it hears late of an engine that is back,
    and a home that was gone for longer than its listings last lists its engines when they are back."""
    found: list[Reading] = []

    def begins() -> bool:
        with suppress(EngineNotListed):
            found.append(world.reader.read(request, timeout=timeout))
        return bool(found)

    until(begins)
    return found[0]


def serve(world: World, request: Request) -> None:
    """A request is read, and its bytes are good."""
    reading = _read(world, request)
    seen = reading.outcome(PATIENT)
    assert seen.error is None, seen.error
    assert world.reader.right(), "wrong bytes were handed over as good"
    assert reading.wait_quiet(SOON)


def refused(world: World, request: Request) -> None:
    """A request cannot be read any more."""
    reading = _read(world, request)
    error = reading.outcome(PATIENT).error
    # A read without a lease that takes half a second asks for one, and says so.
    late = (TransferExpired,) if world.optimistic else ()
    assert isinstance(error, (PeerRestarted, *GONE, *late)), repr(error)
    assert reading.wait_quiet(SOON)


def works(world: World) -> None:
    """The next request is served as if nothing had been."""
    request = world.source.publish()
    serve(world, request)
    assert world.source.released(request, SOON).outcome.name == "READ"


def nothing_left(world: World) -> None:
    """No publication, no lease, no read, no agent that was given up; and every release came once."""
    for reader in (world.reader, world.spare.ready()):
        until(reader.idle)
    for node in world.nodes:
        try:
            until(node.idle)
        except AssertionError:
            raise AssertionError(f"{node.listen} does not forget: {node.left()}") from None
    assert world.source.scheduler.call("unreleased") == []
    assert world.source.collect() == []
    assert all(len(request.releases) == 1 for request in world.source.requests.values())
    assert world.reader.right(), "bytes changed that nobody read"


def moving(world: World, stop: Sequence[EngineProcess], timeout: float) -> tuple[Request, Reading]:
    """A read under way; some of its bytes have arrived, some have not, and these processes are stopped."""
    while True:
        request = world.source.publish()
        reading, found = world.reader.read_until_moving(request, stop, timeout=timeout)
        if found:
            return request, reading
        # It was over already, which is rare, and no reason to judge anything.
        for process in stop:
            process.resume()
        assert reading.outcome(PATIENT).error is None
        assert reading.wait_quiet(SOON)
        world.source.released(request, SOON)


def _begin(world: World, scenario: Scenario) -> tuple[Request, Reading | None]:
    """Begin a read and inject the fault, in the order that the scenario says. None: there is no read to wait for."""
    timeout = PATIENT if scenario.timeout is None else scenario.timeout.here
    killed_reader = scenario.target is Target.READER and scenario.fault is Fault.KILLED
    if scenario.moment is Moment.DURING:
        engine = [party for party in parties(world, scenario.target) if isinstance(party, EngineProcess)]
        # A reader is stopped before it is killed, and not its source: UCX may end a source that was stopped meanwhile
        # (docs/nixl.md, "Endpoint timeout").
        itself = bool(engine) and (scenario.fault is Fault.STOPPED or killed_reader)
        request, reading = moving(world, engine if itself else [world.standing], timeout)
        _inject(world, scenario)
        if not itself and not scenario.still:
            world.standing.resume()
        return request, None if killed_reader else reading
    request = world.source.publish()
    if scenario.moment is Moment.AFTER:
        serve(world, request)
        _inject(world, scenario)
        return request, None
    _inject(world, scenario)
    if world.reader.process not in parties(world, scenario.target):
        if scenario.until is Until.AT_ONCE:
            with suppress(EngineNotListed):
                return request, world.reader.read(request, timeout=timeout)
            # A home that was told to end has withdrawn its listings, and the reader has heard of that: no read waits.
            _restore(world, scenario)
        return request, _read(world, request, timeout)
    return request, None if killed_reader else world.reader.send_read(request, timeout=timeout)


def parties(world: World, target: Target) -> Sequence[Party]:
    """The processes of a target."""
    found: dict[Target, Sequence[Party]] = {
        Target.SOURCE_RANK: [world.source.second],
        Target.SOURCE_ENGINE: world.source.processes,
        Target.READER: [world.reader.process],
        Target.HOME: [world.home],
        Target.NODE: [world.node],
        Target.SOURCE_MACHINE: [world.home, *world.source.processes],
        Target.READER_MACHINE: [world.node, world.reader.process],
        Target.RELAY: [world.relay],
    }
    return found[target]


def _inject(world: World, scenario: Scenario) -> None:
    for party in parties(world, scenario.target):
        if scenario.fault is Fault.STOPPED:
            party.stop()
        elif scenario.fault is Fault.RESTARTED:
            assert isinstance(party, Node)
            party.drain()
        else:
            party.kill()


def _restore(world: World, scenario: Scenario) -> None:
    """End the fault."""
    if scenario.still:
        world.standing.resume()
    for party in parties(world, scenario.target):
        if scenario.fault is Fault.STOPPED:
            party.resume()
        elif isinstance(party, Node) and not party.alive:
            party.start().ready()
    if scenario.fault is Fault.KILLED and scenario.target is Target.READER:
        world.replace_reader()


def judge_read(reading: Reading, expected: Expected) -> None:
    """How the read ended, within its bound."""
    seen = _end(reading, expected)
    assert _as(expected, seen), seen


def _judge_read(world: World, reading: Reading, scenario: Scenario) -> Expected:
    """How the read of a scenario ended; gives what is expected of the rest."""
    expected = scenario.expected
    seen = _end(reading, expected)
    if scenario.target is Target.HOME and world.optimistic and seen.leased and not _as(expected, seen):
        expected = LEASED_IN_TIME
    assert _as(expected, seen), seen
    return expected


def _end(reading: Reading, expected: Expected) -> Seen:
    if reading.number < 0:
        answer = reading.reader.process.answer(SOON)
        reading.number = answer[0] if isinstance(answer, tuple) else answer
    return reading.outcome(seconds(expected.destination_bound))


def _as(expected: Expected, seen: Seen) -> bool:
    return any(fits(seen, outcome) for outcome in expected.destination)


def fits(seen: Seen, outcome: Good | type[KvferryError]) -> bool:
    """Whether a read ended as it may."""
    if isinstance(outcome, Good):
        return seen.error is None and outcome.confirmed in (None, seen.confirmed)
    return isinstance(seen.error, outcome)


def judge_release(world: World, request: Request, expected: Expected) -> None:
    """How the publication ended, within its bound."""
    release = world.source.released(request, seconds(expected.source_bound))
    assert release.outcome in expected.source, release
