"""A rank whose sources and transport do as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._memory.rank_memory import RankMemory, Tails
from kvferry._reads.meters import ShareMeter
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Verifier
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.transfer import Transfer
from kvferry._transport.transport import TransferPart, Transport
from kvferry.errors import TransferFailed
from kvferry.geometry import Blocks, Group
from kvferry.geometry.blocks import Unfinished, joined
from kvferry.planner.expansion import SourceDescriptors
from tests.support.loops import PlayedLoop

LONG = 600.0
LEASE = ReaderLease.without_end(b"l" * 16)
SOURCE = ("home:1", "prefill", b"i" * 16)
AGENT = AgentInfo("prefill/1", b"", b"", ())
GROUP = Group("full", block_tokens=16, num_blocks=8)
GRANTED, BLOCKS = {"full": Blocks([2])}, {"full": Blocks([7])}
PLANES = ("the planes of the rank",)


class PlayedRank:
    """A rank, its sources, and what its engine was told."""

    def __init__(self, *, verifies: bool = False) -> None:
        self.changed = threading.Condition()
        self.ended: list[RankRead] = []
        self.quiesced: list[RankRead] = []
        self.transfers: list[Transfer] = []
        self.asked: list[str] = []
        self.closed = False
        self.answers: dict[str, SourceEngine | Exception] = {}
        self.said: list[str] = []
        self.parts: list[Sequence[TransferPart]] = []
        self.expanded: list[tuple[object, ...]] = []
        self.lasts: list[bool] = []
        """Whether each was said to be the last."""
        self.first = GRANTED
        self.reaches = 1
        """0: what was told is not enough for anything to move."""
        self.known_sources: dict[tuple[object, ...], SourceEngine] = {}
        self.size = 10
        self.verified: list[RankRead] = []
        self.verify: Callable[[RankRead], None] = self.verified.append
        self.loop = PlayedLoop()
        self.reads = RankReads(
            self.loop,
            cast(Transport, SimpleNamespace(start=lambda *parts, **how: self.transfer(*parts, **how))),
            cast(SourceEngines, self),
            RankMemory(),
            cast(Verifier, SimpleNamespace(verify=self.compare)) if verifies else None,
            ShareMeter(),
        )
        self.tell_ended, self.tell_quiesced = self.tell(self.ended), self.tell(self.quiesced)

    # What stands in for sources and the transport.

    def known(self, source: tuple[object, ...]) -> SourceEngine | None:
        return self.known_sources.get(source)

    async def get(self, _: Control, __: object, reference: str, *___: object) -> SourceEngine:
        with self.changed:
            self.asked.append(reference)
            self.changed.notify_all()
        answer = await asyncio.to_thread(self.answered, reference)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answered(self, reference: str) -> SourceEngine | Exception:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or reference in self.answers, 30)
            return self.answers.get(reference, TransferFailed("nobody has answered"))

    async def compare(self, read: RankRead, _: object) -> None:
        await self.loop.on_thread(lambda: self.verify(read), "kvferry-verify-test")

    def failed(self, *_: object) -> None:
        self.said.append("failed")

    def succeeded(self, *_: object) -> None:
        self.said.append("succeeded")

    def expand(self, *wanted: object) -> object:
        with self.changed:
            self.expanded.append(wanted)
            self.changed.notify_all()
        planned = SourceDescriptors(1, (), ())
        return SimpleNamespace(sources=(planned,) * self.reaches, descriptors=3, pieces=5)

    def in_parts(self, blocks: object, tokens: object) -> object:
        parts = SimpleNamespace(granted={})

        def following(granted: Mapping[str, Blocks], unfinished: Unfinished | None, *, last: bool) -> object:
            self.lasts.append(last)
            parts.granted = joined((parts.granted, granted))
            return self.expand(granted, blocks, tokens)

        parts.next = following
        return parts

    def transfer(self, parts: Sequence[TransferPart], *, deadline: float | None, label: str) -> Transfer:
        with self.changed:
            made = Transfer(label, self.size, deadline, now, lambda: self.look(made))
            # Posted at once.
            made.begin()
            self.parts.append(parts)
            self.transfers.append(made)
            self.changed.notify_all()
        return made

    @staticmethod
    def look(transfer: Transfer) -> None:
        """What a reading thread does that is woken."""
        transfer.settle(now())

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

    def peer(self) -> SourceEngine:
        rank, named = SimpleNamespace(planes=PLANES), {GROUP.name: GROUP}
        plan = SimpleNamespace(in_parts=self.in_parts, groups=(GROUP,), groups_by_name=(named, named), rank=rank)
        return cast(SourceEngine, SimpleNamespace(plan_of=lambda layers: plan, agents={1: AGENT}))

    def answer(self, reference: str, answer: Exception | None = None) -> None:
        with self.changed:
            self.answers[reference] = answer or self.peer()
            self.changed.notify_all()

    def start(
        self, reference: str = "a", *, within: float = LONG, tails: Tails = Tails.KEEP, complete: bool = True
    ) -> RankRead:
        home = cast(Control, SimpleNamespace(address=SOURCE[0]))
        order = RankOrder(
            f"read-{reference}", "r", home, SOURCE[1], SOURCE[2], 1, reference, LEASE,
            GrantedPart(self.first, complete=complete), Wanted(BLOCKS, (3, 5), tails=tails), now() + within,
        )  # fmt: skip
        read = RankRead(self.loop, order)
        self.reads.start(read, lambda share: self.tell_ended(share), lambda share: self.tell_quiesced(share))
        return read

    def add(self, read: RankRead, blocks: Mapping[str, Blocks], *, last: bool) -> None:
        self.loop.call(lambda: read.add(GrantedPart(blocks, complete=last)))

    def worked(self) -> None:
        """Wait until all that can happen now has happened."""
        self.loop.turn()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for transfer in self.transfers:
            transfer.cancel()
            if not transfer.quiet:
                transfer.fenced()
        self.reads.close(self.loop.now() + 20)
        self.loop.close()

    def moving(self, *, within: float = LONG) -> RankRead:
        self.answer("a")
        read = self.start(within=within)
        self.until(lambda: self.transfers)
        return read
