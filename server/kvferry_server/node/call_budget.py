"""The budget of calls: how many run at once on one listener."""

from __future__ import annotations

from kvferry.errors import LimitReached
from kvferry_server.node.times import RETRY_AFTER


class CallBudget:
    """How many calls may run at once, and how many of them one host may have.

    A host may start a call as long as it has fewer than are free: one host alone gets half, each of two gets a third,
    and one is always free for a host that has none. Callers on the UNIX socket cannot be told apart and may have all.

    Args:
        limit: the name of the limit, for errors.
        most: how many calls may run at once.

    Attributes:
        most: how many calls may run at once.
        used: how many run.
    """

    def __init__(self, limit: str, most: int) -> None:
        self.most = most
        self.used = 0
        self._limit = limit
        self._hosts: dict[str, int] = {}

    def start(self, host: str) -> None:
        """Count one call of a host, until `end`; raises `LimitReached` if it may not start."""
        mine, left = self._hosts.get(host, 0), self.most - self.used
        if left <= 0 or (host and mine >= left):
            who = f"{mine} of them from {host}" if host else "over the UNIX socket"
            raise LimitReached(
                f"{self._limit}: {self.used} of at most {self.most} calls are running, {who}",
                retry_after=RETRY_AFTER,
                limit=self._limit,
                value=self.most,
            )
        self._hosts[host] = mine + 1
        self.used += 1

    def end(self, host: str) -> None:
        """Note the end of a call that has started."""
        self.used -= 1
        mine = self._hosts[host] - 1
        if mine:
            self._hosts[host] = mine
        else:
            del self._hosts[host]
