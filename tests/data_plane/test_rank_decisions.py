"""One rank's shares, moment by moment: which error is whose, and when a share has ended and is quiet (R4, R5, R10).

Sources and the transport do as a test says, since real ones do not fail at a moment that a test names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._memory.summing import Summers
from kvferry._memory.tails import Tails
from kvferry._reads.rank_reads import RankOrder, RankRead, RankReads
from kvferry._reads.source_engines import Peer, Peers
from kvferry._transport.transfer import Transfer
from kvferry._transport.transport import Transport
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    PublicationStale,
    TransferCancelled,
    TransferFailed,
    TransferStuck,
    Unavailable,
    WrongKey,
)

LONG = 600.0
SOURCE = ("home:1", "prefill", b"i" * 16)


class World:
    """A rank, its sources, and what its engine was told."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended: list[RankRead] = []
        self.quiesced: list[RankRead] = []
        self.transfers: list[Transfer] = []
        self.asked: list[str] = []
        self.answers: dict[str, Peer | KvferryError] = {}
        self.said: list[str] = []
        self.met: Peer | None = None
        self.size = 10
        self.reads = RankReads(
            cast(Transport, SimpleNamespace(start=self.transfer)),
            cast(Peers, self),
            cast(Summers, None),
            None,
            self.tell(self.ended),
            self.tell(self.quiesced),
        )

    # What stands in for sources and the transport.

    def known(self, *_: object) -> Peer | None:
        return self.met

    def get(self, home: Control, engine_id: str, incarnation: bytes, reference: str, deadline: float) -> Peer:
        with self.changed:
            self.asked.append(reference)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: reference in self.answers, 30)
            answer = self.answers[reference]
        if isinstance(answer, KvferryError):
            raise answer
        return answer

    def gone(self, *_: object) -> None:
        self.said.append("gone")

    def failed(self, *_: object) -> None:
        self.said.append("failed")

    def succeeded(self, *_: object) -> None:
        self.said.append("succeeded")

    def transfer(self, _: object, *, deadline: float | None, label: str) -> Transfer:
        with self.changed:
            # A reading thread that is woken looks at its transfers.
            made = Transfer(label, self.size, 1, deadline, now, lambda: made.settle(now()))
            # Posted at once.
            made.begin()
            self.transfers.append(made)
            self.changed.notify_all()
        return made

    # What a test does.

    def tell(self, told: list[RankRead]) -> Callable[[RankRead], None]:
        def add(read: RankRead) -> None:
            with self.changed:
                told.append(read)
                self.changed.notify_all()

        return add

    def until(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)

    def answer(self, reference: str, answer: KvferryError | None = None) -> None:
        peer = SimpleNamespace(plan=SimpleNamespace(expand=lambda *_: SimpleNamespace(sources=())), agents={})
        with self.changed:
            self.answers[reference] = answer or cast(Peer, peer)
            self.changed.notify_all()

    def start(self, reference: str = "a", *, within: float = LONG) -> RankRead:
        home = cast(Control, SimpleNamespace(address=SOURCE[0]))
        order = RankOrder(
            f"read-{reference}", "r", home, SOURCE[1], SOURCE[2], 1, reference, b"", {}, {}, None, Tails.KEEP,
            now() + within,
        )  # fmt: skip
        return self.reads.start(order)

    def moving(self, *, within: float = LONG) -> RankRead:
        self.answer("a")
        read = self.start(within=within)
        self.until(lambda: self.transfers)
        return read


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for transfer in made.transfers:
        transfer.cancel()
        if not transfer.quiet:
            transfer.fenced()
    made.reads.close(20)


def test_a_share_that_arrived_ended_well_and_is_quiet(world: World) -> None:
    read = world.moving()
    world.transfers[0].landed(10)
    world.until(lambda: world.ended)
    assert (read.error, read.quiet, read.bytes) == (None, True, 10)
    assert (world.said, world.quiesced) == (["succeeded"], [])


def test_a_share_that_failed_is_told_at_once_and_its_quiet_once(world: World) -> None:
    read = world.moving()
    world.transfers[0].fail(TransferFailed("the peer died"))
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferFailed)
    assert not read.quiet
    assert world.quiesced == []
    assert world.said == ["failed"]
    world.transfers[0].fenced()
    world.until(lambda: world.quiesced)
    assert read.quiet
    world.reads.cancel(read)
    world.reads.close(20)
    assert (world.ended, world.quiesced) == ([read], [read])


def test_a_cancel_says_nothing_of_the_source(world: World) -> None:
    read = world.moving()
    world.reads.cancel(read)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)
    assert not read.quiet
    assert world.said == []


def test_a_share_that_is_overdue_ends_and_its_error_tells_when_it_is_quiet(world: World) -> None:
    read = world.moving(within=0.05)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferStuck)
    assert now() >= read.order.deadline
    assert not read.quiet
    assert not read.error.quiet
    world.transfers[0].landed(10)
    world.until(lambda: world.quiesced)
    assert read.error.quiet
    # That it came in the end does not count.
    assert isinstance(read.error, TransferStuck)
    assert world.said == []


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_a_share_that_ended_while_its_source_was_met_is_not_begun(world: World, how: str) -> None:
    read = world.start(within=0.05 if how == "overdue" else LONG)
    world.until(lambda: world.asked)
    if how == "cancelled":
        world.reads.cancel(read)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled if how == "cancelled" else TransferStuck)
    assert read.quiet
    world.answer("a")
    following = world.start("b")
    world.answer("b")
    world.until(lambda: world.transfers)
    assert [transfer.label for transfer in world.transfers] == [following.order.read_id]


def test_a_source_is_met_once_for_all_that_wait(world: World) -> None:
    world.start("a")
    world.until(lambda: world.asked)
    world.start("b")
    world.answer("b")
    world.answer("a")
    world.until(lambda: len(world.transfers) == 2)
    assert world.asked == ["a"]


@pytest.mark.parametrize("error", [WrongKey("no"), PublicationStale("old")], ids=["key", "stale"])
def test_a_reference_that_is_gone_says_nothing_of_another(world: World, error: KvferryError) -> None:
    first = world.start("a")
    world.until(lambda: world.asked)
    # The thread takes these before the answer, which goes the same way.
    same, other = world.start("a"), world.start("b")
    world.answer("b")
    world.answer("a", error)
    world.until(lambda: len(world.ended) == 2 and world.transfers)
    assert {id(read) for read in world.ended} == {id(first), id(same)}
    assert [transfer.label for transfer in world.transfers] == [other.order.read_id]
    assert world.said == []


@pytest.mark.parametrize(
    ("error", "gone"),
    [(PeerRestarted("anew"), True), (EngineUnknown("who"), True), (TransferFailed("no such source"), False)],
    ids=["restarted", "unknown", "failed"],
)
def test_what_is_true_of_the_source_ends_all_that_wait_for_it(world: World, error: KvferryError, *, gone: bool) -> None:
    world.start("a")
    world.until(lambda: world.asked)
    world.start("b")
    world.answer("b")
    world.answer("a", error)
    world.until(lambda: len(world.ended) == 2)
    assert [type(read.error) for read in world.ended] == [type(error)] * 2
    assert world.said == (["gone"] if gone else [])


def test_who_may_wait_for_longer_tries_again(world: World) -> None:
    short = world.start("a", within=60.0)
    world.until(lambda: world.asked)
    patient = world.start("b")
    world.answer("b")
    world.answer("a", Unavailable("not now"))
    world.until(lambda: world.ended and world.transfers)
    assert world.ended == [short]
    assert isinstance(short.error, Unavailable)
    assert [transfer.label for transfer in world.transfers] == [patient.order.read_id]


def test_after_the_end_nothing_is_begun_and_all_that_ran_was_cancelled(world: World) -> None:
    read = world.moving()
    world.reads.close(20)
    assert isinstance(read.error, TransferCancelled)
    with pytest.raises(Closed):
        world.start("late")
    assert world.quiesced == []
    world.transfers[0].landed(10)
    # Also what becomes quiet later is told.
    assert world.quiesced == [read]
