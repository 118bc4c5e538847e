"""The durations and limits in force at a home (PROTOCOL, Times)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvferry.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, published to engines and readers in answers; shrunk in tests."""

    ttl: float = 30.0
    """A lease from its acceptance or renewal."""
    max_ttl: float = 30.0
    """The longest a lease may run without a renewal; the grace of a re-publish at a restarted home."""
    engine_ttl: float = 10.0
    """From the loss of an engine's Watch until the engine counts as dead, and how long a restarted home waits for
    engines it does not know."""
    hold: float = 120.0
    """A publication that nobody reads."""
    final: float = 600.0
    """From the first step of a publication: no lease reaches past it."""
    max_wait: float = 120.0
    """The longest that ReadBlocks and PollBlocks wait for a publication that has not come."""
    retire: float = 600.0
    """How long a retired incarnation is refused, so that a delayed message cannot evict the living."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1e9:
                raise InvalidField(field.name, value, "a positive number of seconds")
        if self.ttl > self.max_ttl:
            raise InvalidField("ttl", self.ttl, f"at most max_ttl, {self.max_ttl} s")

    @property
    def renew_every(self) -> float:
        """How often a reader renews."""
        return self.ttl / 3

    @property
    def outcomes(self) -> float:
        """How long the outcome of a lease is kept and replayed unchanged."""
        return 2 * self.max_ttl
