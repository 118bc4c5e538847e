"""The limits of a home. Beyond a limit a call fails with LIMIT and a retry delay, so that no queue grows without
bound."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import LimitReached


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, unless a field says bytes. Far above what working engines need; they bound what a faulty engine can
    take."""

    engines: int = 1024  # Engines at a home, including dead ones that may still come back
    ranks: int = 4096  # Ranks of one engine; also the parties of one read
    memory: int = 1 << 30
    """Bytes that the home keeps for all engines: registrations, publications, leases, reports, checksums and events.
    An engine, and all engines of one host together, get at most as much as stays free."""
    engine_memory: int = 1 << 20  # Bytes that every engine gets, whatever the others hold
    retired: int = 16_384
    """Retired incarnations that are refused. The engines of a host retire at most as many as stay free."""
    publications: int = 65_536  # Publications of one engine whose release is not acknowledged
    checksum_bytes: int = 1 << 28  # Bytes of checksums for the unreleased publications of one engine
    reads: int = 1024  # Reads of one publication, including ended ones
    raised_reads: int = 64
    """Expected reads of a publication that a reader can state. The source may state up to `reads`."""
    leases: int = 262_144
    """Leases at a home, including ended ones whose outcome is kept. The publications of one engine get at most as many
    as stay free."""
    waiting_reads: int = 4096
    """Live leases on publications of one engine that have not arrived; and as many reads that wait under routers' keys.
    A reader gets at most as many as stay free."""
    waiting_declines: int = 4096
    """Publications of one engine that were declined before they arrived; and as many more under routers' keys, of which
    a caller gets at most as many as stay free."""
    watch_queue: int = 1024  # Events that a Watch may fall behind before its answer is `lagged`


# Leases, and publications, that one pass of the timers ends: 100,000 may be due, and the event loop waits for a pass.
MAX_ENDED_AT_ONCE = 256
MAX_PAST_ROUTER_KEYS = 4096  # Router keys of one engine kept after their publications; the oldest are forgotten first
MAX_QUESTIONS = 64  # Questions to one engine that it has not answered; one that ended so counts for `ENDED_KEPT`
MAX_SKIPPED = 1024  # Publication numbers below an engine's high-water mark that may still arrive
MAX_PAYLOAD = 64 * 1024  # Bytes of a publication's payload
MAX_REGION_CHECKS = 1 << 22  # Planes times regions of one rank: bounds the work on one registration
MAX_CHECKSUM_PAGES = 256  # Checksum pages of one plane of a publication: each new page is compared with all of them
CHECKSUM_BATCH = 1 << 14  # Block positions that a new checksum page is compared with in one step
MAX_NAMED_RANKS = 64  # Missing ranks that an answer or error lists; the rest are counted
MAX_NAMED_NODES = 16  # Node servers of missing ranks that an error lists
MAX_NOTED_READERS = 1024  # Digests of geometries found compatible with an engine's; beyond, all are compared again
RANK_PAGE_BYTES = 1 << 20  # Bytes of ranks in one Handshake message; small, so that sending a message takes little time
MAX_RANK_BYTES = 7 << 19  # Encoded bytes of one rank and its agent: with `MAX_HEADER_BYTES` they fit one message
MAX_HEADER_BYTES = 1 << 18  # Encoded bytes of an engine without its ranks
CALLER_FLOOR_BYTES = 64 << 10  # Bytes of unsent answers and questions that every caller gets. Most are far smaller.


def check_limit(limit: str, count: int, most: int, retry_after: float) -> None:
    """Raise `LimitReached` if there is no room for one more. `limit` names the limit in the error; `retry_after` is in
    seconds."""
    if count >= most:
        raise LimitReached(
            f"{limit}: the server holds {count} of at most {most}", retry_after=retry_after, limit=limit, value=most
        )
