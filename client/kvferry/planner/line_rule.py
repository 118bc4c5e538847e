"""The line rule: for each part of a tensor, which of its replicas serves which blocks to which reader.

A reader's units are cut at every boundary that any holder or reader declares, so that each elementary interval has one
set of holders (replicas) and one set of readers. Then (DESIGN §5):

    the K·n blocks that K readers want of a request of n blocks lie on one line, reader after reader, and replica j
    of R serves [j·K·n // R, (j+1)·K·n // R).

So each replica serves at most ceil(K·n/R) blocks, each reader uses at most ceil(R/K)+1 replicas, and stripes are
contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from kvferry.geometry.plane import Interval, TokenShard


@dataclass(frozen=True, slots=True)
class Stripe:
    """The share ``[begin, end)`` of ``of`` equal parts of a request's blocks; (0, 1, 1) is all of them."""

    begin: int = 0
    end: int = 1
    of: int = 1

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == self.of

    def __str__(self) -> str:
        return f"[{self.begin}, {self.end}) of {self.of}"

    def blocks(self, count: int) -> tuple[int, int]:
        """The half-open range of blocks that this stripe takes of `count`."""
        return self.begin * count // self.of, self.end * count // self.of


@dataclass(frozen=True, slots=True)
class RankHolding:
    """A rank's part of a tensor."""

    rank: int
    units: Interval
    tokens: TokenShard


@dataclass(frozen=True, slots=True)
class ReadShare:
    """A reader's share of one rank: a stripe of some units, of the tokens that both hold."""

    rank: int
    units: Interval
    stripe: Stripe


def shares(
    held: tuple[RankHolding, ...], wanted: tuple[RankHolding, ...], me: RankHolding, *, divide: bool, striping: bool
) -> tuple[tuple[ReadShare, ...], tuple[Interval, ...]]:
    """The shares of one reader, and the units that no rank can give the reader.

    `held` are the holdings of the source's ranks, and `wanted` those of the destination's, the reader `me` among them.
    `divide`: single units may be read; else all of the reader's units from ranks that hold exactly these. `striping`:
    spread reads over replicas; else the line rule chooses one replica for a whole read.
    """
    found: list[ReadShare] = []
    missing: list[Interval] = []
    for units in _elementary(held, wanted, me) if divide else [me.units]:
        holders = [h for h in held if (h.units.intersect(units) is not None if divide else h.units == units)]
        readers = [reader for reader in wanted if reader.units.intersect(units) is not None]
        # Readers of one token shard share its replicas, whatever other shards they need.
        needs = {tokens: _token_shards(holders, tokens) for tokens in {reader.tokens for reader in readers}}
        if not needs[me.tokens]:
            missing.append(units)
        for shard in needs[me.tokens]:
            replicas = sorted(holder.rank for holder in holders if holder.tokens == shard)
            line = sorted(reader.rank for reader in readers if shard in needs[reader.tokens])
            stripes = _stripes(replicas, line.index(me.rank), len(line), striping)
            found.extend(ReadShare(rank, units, stripe) for rank, stripe in stripes)
    return tuple(_joined(found)), tuple(missing)


def effort(held: tuple[RankHolding, ...], wanted: tuple[RankHolding, ...], me: RankHolding, *, divide: bool) -> int:
    """About how many steps `shares` takes."""
    pieces = len(_elementary(held, wanted, me)) if divide else 1
    families = {(holder.tokens.count, holder.tokens.interleave) for holder in held}
    asked = len({reader.tokens for reader in wanted})
    return pieces * (len(held) + len(wanted) + asked * sum(count for count, _ in families))


def _elementary(held: tuple[RankHolding, ...], wanted: tuple[RankHolding, ...], me: RankHolding) -> list[Interval]:
    """The reader's units, cut at every boundary that any holder or reader declares."""
    cuts = {me.units.begin, me.units.end}
    for holding in (*held, *wanted):
        cuts |= {edge for edge in (holding.units.begin, holding.units.end) if me.units.begin < edge < me.units.end}
    edges = sorted(cuts)
    return [Interval(begin, end) for begin, end in pairwise(edges)]


def _token_shards(holders: list[RankHolding], wanted: TokenShard) -> tuple[TokenShard, ...]:
    """The holders' shards that together hold the wanted tokens, each once; empty if there are none.

    Shards of one (count, interleave) are disjoint. Of several complete families the reader's own is taken, because it
    needs no cuts, else the family with the fewest shards.
    """
    own = (wanted.count, wanted.interleave)
    families = {(holder.tokens.count, holder.tokens.interleave) for holder in holders}
    offered = {holder.tokens for holder in holders}
    for count, interleave in sorted(families, key=lambda family: (family != own, family)):
        found = []
        for index in range(count):
            shard = TokenShard(index, count, interleave)
            if _meet(shard, wanted):
                if shard not in offered:
                    break
                found.append(shard)
        else:
            return tuple(found)
    return ()


def _meet(a: TokenShard, b: TokenShard) -> bool:
    """Whether two token shards have a token in common.

    Each is an interval modulo its period; they meet when two of their members are equal modulo the gcd of the periods.
    """
    common = math.gcd(a.count * a.interleave, b.count * b.interleave)
    apart = a.index * a.interleave - b.index * b.interleave
    lowest, highest = apart - (b.interleave - 1), apart + (a.interleave - 1)
    return highest // common * common >= lowest


def _stripes(replicas: list[int], place: int, readers: int, striping: bool) -> list[tuple[int, Stripe]]:
    """The stripes, by replica, of the reader at position `place` of `readers` on the line."""
    total = len(replicas)
    if not striping or total == 1:
        return [(replicas[place * total // readers], Stripe())]
    found = []
    for index, rank in enumerate(replicas):
        begin = min(max(index * readers - place * total, 0), total)
        end = min(max((index + 1) * readers - place * total, 0), total)
        if begin < end:
            found.append((rank, Stripe() if (begin, end) == (0, total) else Stripe(begin, end, total)))
    return found


def _joined(found: list[ReadShare]) -> list[ReadShare]:
    """The shares, with neighbouring units of the same source and stripe joined."""
    joined: list[ReadShare] = []
    ordered = sorted(found, key=lambda s: (s.rank, s.stripe.of, s.stripe.begin, s.stripe.end, s.units.begin))
    for share in ordered:
        last = joined[-1] if joined else None
        if last and (last.rank, last.stripe, last.units.end) == (share.rank, share.stripe, share.units.begin):
            joined[-1] = ReadShare(share.rank, Interval(last.units.begin, share.units.end), share.stripe)
        else:
            joined.append(share)
    return joined
