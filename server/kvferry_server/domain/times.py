"""The durations in force at a home, in seconds (PROTOCOL, Times)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvferry.errors import InvalidField

ANSWER_HOLD = 10.0
"""The longest hold, in seconds, of a publication that answers a question: its asker begins to read at once, or not at
all."""

ENDED_KEPT = 2.0
"""Seconds for which the end of a question without a publication is remembered."""

RECOVERING_RETRY_AFTER = 0.25  # Retry delay, in seconds, while a home waits for its engines after a restart


@dataclass(frozen=True, slots=True)
class Times:
    """Settings of a home, each in seconds. Engines and readers get them in answers; tests shrink them. Raises
    `InvalidField` if a duration is not positive, or `ttl` is longer than `max_ttl`."""

    ttl: float = 30.0  # How long a lease lasts from its acceptance, or from its last renewal
    max_ttl: float = 30.0  # The longest without a renewal; a restarted home keeps a re-published request as long
    engine_ttl: float = 10.0  # From the loss of an engine's Watch to its death. A restarted home waits as long
    hold: float = 120.0  # How long a publication is held without a live lease before it ends as unread
    final: float = 600.0  # From the first step of a publication to its final deadline. No lease extends past it
    max_wait: float = 120.0  # The longest that ReadBlocks waits for news of a publication
    retire: float = 600.0  # How long a replaced incarnation is refused, and a dead engine remembered

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1e9:
                raise InvalidField(field.name, value, "a positive number of seconds")
        if self.ttl > self.max_ttl:
            raise InvalidField("ttl", self.ttl, f"at most max_ttl, {self.max_ttl} s")

    @property
    def renew_every(self) -> float:
        """Seconds between a reader's renewals."""
        return self.ttl / 3

    @property
    def keep_outcome(self) -> float:
        """Seconds for which the outcome of an ended lease is kept and replayed unchanged."""
        return 2 * self.max_ttl
