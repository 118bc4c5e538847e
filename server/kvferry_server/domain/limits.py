"""What a home holds at most. Beyond a limit the answer is LIMIT with a retry delay, never a queue without end."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import LimitReached


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, unless a field says otherwise. Far above what real engines need; they bound what a broken one can
    take."""

    engines: int = 1024
    """Engines at a home, dead ones that may still come back included."""
    ranks: int = 4096
    """Ranks of one engine; also the parties of one read."""
    memory: int = 1 << 30
    """Bytes that the home keeps on behalf of all engines: registrations, publications, leases, reports, sums, events.
    An engine, and all engines of one peer together, get at most as much as stays free."""
    engine_memory: int = 1 << 20
    """Bytes of it that no engine is refused, whatever others take."""
    publications: int = 65_536
    """Publications of one engine, until their release is acknowledged."""
    checksum_bytes: int = 1 << 28
    """Bytes that the sums of the unreleased publications of one engine take."""
    reads: int = 1024
    """Reads of one publication, ended ones included."""
    raised_reads: int = 64
    """Reads that a reader can make a publication expect; its source may state as many as `reads`."""
    leases: int = 262_144
    """Leases at a home, ended ones included whose outcome is still kept. On one engine's publications there are at most
    as many as stay free."""
    waiting_reads: int = 4096
    """Live leases on publications of one engine that have not come. A reader gets at most as many as stay free."""
    waiting_declines: int = 4096
    """Publications of one engine that were declined before they came."""
    watch_queue: int = 1024
    """Events that a Watch may be behind before it is told that it lagged."""


def check_limit(limit: str, count: int, most: int, retry_after: float) -> None:
    """Raise `LimitReached` if there is no room for one more.

    Args:
        limit: the field of `Limits`.
        count: how many there are.
        most: how many there may be.
        retry_after: seconds after which there can be room.
    """
    if count >= most:
        raise LimitReached(
            f"{limit}: the server holds {count} of at most {most}",
            retry_after=retry_after,
            limit=limit,
            value=most,
        )
