"""How what a home has room for is shared out, so that nobody who takes all he can get leaves others without.

Whoever holds more than the floor may take no more than would stay free: one holder gets at most half of the room, three
that take all they can a quarter each, and the last quarter stays for everybody else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import LimitReached
from kvferry_server.domain.identity import EngineRef

ASKER_FLOOR = 64 << 10
"""Bytes of answers not taken yet that nobody is refused: most answers have far fewer."""

LOCAL = "callers on this host"
"""The peer of those who ask and cannot be told apart."""


class Shares:
    """Room that many share.

    Args:
        most: all the room there is.
        floor: what a holder gets for as long as there is any room, whatever the others hold; by default the 256th part.

    Attributes:
        used: what all hold together.
    """

    def __init__(self, most: int, floor: int | None = None) -> None:
        self.most = most
        self.floor = max(1, most // 256) if floor is None else floor
        self.used = 0
        self._held: dict[Hashable, int] = {}

    def held(self, holder: Hashable) -> int:
        """What one holds."""
        return self._held.get(holder, 0)

    def fits(self, holder: Hashable, size: int = 1) -> bool:
        """Whether there is room for so much more of one's."""
        free = self.most - self.used - size
        return free >= 0 and (self.in_floor(holder, size) or self.held(holder) + size <= free)

    def in_floor(self, holder: Hashable, size: int = 1) -> bool:
        """Whether one would still hold no more than the floor."""
        return self.held(holder) + size <= self.floor

    def take(self, holder: Hashable, size: int = 1) -> None:
        """One holds so much more; negative: so much less."""
        self.used += size
        held = self._held.get(holder, 0) + size
        if held:
            self._held[holder] = held
        else:
            self._held.pop(holder, None)

    def give(self, holder: Hashable, size: int = 1) -> None:
        """One holds so much less."""
        self.take(holder, -size)


def check_share(limit: str, shares: Shares, holder: Hashable, retry_after: float, size: int = 1) -> None:
    """Raise `LimitReached` if a holder may not take so much more.

    Args:
        limit: what is shared, a field of `Limits`.
        shares: the room.
        holder: who wants more.
        retry_after: seconds after which there can be room.
        size: how much more.
    """
    if not shares.fits(holder, size):
        raise LimitReached(
            f"{limit}: this one holds {shares.held(holder)}, all together {shares.used} of {shares.most}",
            retry_after=retry_after,
            limit=limit,
            value=shares.most,
        )


class Memory:
    """Bytes that a home holds, by the engine on whose behalf, and by the peer that the engine came from.

    Sizes are what things take in memory, about. Peers of a UNIX socket cannot be told apart: they are no peer, and
    their engines' shares decide.

    Args:
        most: bytes of the home.
        floor: bytes of one engine that are never refused; beyond `most`, if it comes to that.
        retry_after: seconds after which there can be room.
    """

    def __init__(self, most: int, floor: int, retry_after: float) -> None:
        self._engines = Shares(most, floor)
        self._peers = Shares(most, 0)
        self._peer_of: dict[EngineRef, str] = {}
        self._retry_after = retry_after

    @property
    def used(self) -> int:
        """Bytes of all engines."""
        return self._engines.used

    def held(self, engine: EngineRef) -> int:
        """Bytes of one engine."""
        return self._engines.held(engine)

    def comes_from(self, engine: EngineRef, peer: str) -> None:
        """The peer of an engine, now; empty if it cannot be told apart."""
        before, held = self._peer_of.pop(engine, ""), self._engines.held(engine)
        if before:
            self._peers.give(before, held)
        if peer:
            self._peer_of[engine] = peer
            self._peers.take(peer, held)

    def check(self, engine: EngineRef, size: int) -> None:
        """Raise `LimitReached` if there is no room for so many bytes more of an engine's."""
        if not self._engines.in_floor(engine, size):
            self._check(engine, self._peer_of.get(engine), size)

    def take(self, engine: EngineRef, size: int) -> None:
        """So many bytes more; negative: less."""
        self._engines.take(engine, size)
        peer = self._peer_of.get(engine)
        if peer is not None:
            self._peers.take(peer, size)

    def give(self, engine: EngineRef, size: int) -> None:
        """So many bytes less."""
        self.take(engine, -size)

    @contextmanager
    def telling(self, asker: Hashable, peer: str, size: int) -> Iterator[None]:
        """Bytes of an answer that waits until it is taken. They are those of who asked: whoever does not take what he
        asked for leaves the engine that he asked about, and its other readers, what they had. Checked.

        Args:
            asker: who asked.
            peer: that he comes from; empty if it cannot be told apart: all of those share what one peer gets.
            size: of the answer.
        """
        asker, peer = _Asker(asker), peer or LOCAL
        if self._engines.held(asker) + size > ASKER_FLOOR:
            self._check(asker, peer, size)
        self._engines.take(asker, size)
        self._peers.take(peer, size)
        try:
            yield
        finally:
            self._engines.give(asker, size)
            self._peers.give(peer, size)

    @contextmanager
    def holding(self, engine: EngineRef, size: int) -> Iterator[None]:
        """Bytes that are held for an engine for a while. Not checked."""
        self.take(engine, size)
        try:
            yield
        finally:
            self.give(engine, size)

    def _check(self, holder: Hashable, peer: str | None, size: int) -> None:
        if self._engines.fits(holder, size) and (peer is None or self._peers.fits(peer, size)):
            return
        raise LimitReached(
            f"memory: {holder} holds {self._engines.held(holder)} bytes; {size} more are above its share "
            f"of this server's {self._engines.most}",
            retry_after=self._retry_after,
            limit="memory",
            value=self._engines.most,
        )


@dataclass(frozen=True, slots=True)
class _Asker:
    """Who asks has an account of his own, also where he calls himself like an engine."""

    name: Hashable

    def __str__(self) -> str:
        return f"who asks as {self.name}"
