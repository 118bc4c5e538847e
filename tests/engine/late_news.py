"""News that come just as a wait for them ends."""

from __future__ import annotations

import threading
from collections.abc import Callable


class LateNews(threading.Event):
    """An event after whose first wait something happens."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens: list[Callable[[], object]] = [happens]

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        while self._happens:
            self._happens.pop()()
        return found
