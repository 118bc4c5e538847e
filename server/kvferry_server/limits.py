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
    publications: int = 65_536
    """Publications of one engine, until their release is acknowledged."""
    publication_bytes: int = 1 << 30
    """Bytes that the unreleased publications of one engine take, payloads and block lists together."""
    checksum_bytes: int = 1 << 28
    """Bytes that the sums of the unreleased publications of one engine take."""
    reads: int = 1024
    """Reads of one publication, ended ones included."""
    leases: int = 262_144
    """Leases at a home, ended ones included whose outcome is still kept."""
    waiting_reads: int = 4096
    """Live leases on publications of one engine that have not come."""
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
