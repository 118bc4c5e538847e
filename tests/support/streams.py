"""A stream of requests that several threads send, while a test does something to those that answer."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from tests.support.waiting import until

Answer = TypeVar("Answer")


class Stream(Generic[Answer]):
    """Sends requests 0, 1, … each from the thread that has its answer to the one before. A context manager, which waits
    for those that are under way.

    Args:
        send: sends the request of a number, and returns its answer.
        threads: how many requests are under way at once.

    Attributes:
        answers: by number.
        failures: what `send` raised, by number.
    """

    def __init__(self, send: Callable[[int], Answer], threads: int) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._allowed = 0.0
        self._change = threading.Condition()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.answers: dict[int, Answer] = {}
        self.failures: dict[int, str] = {}

    def allow(self, count: float) -> None:
        """Let the threads send the first so many requests."""
        with self._change:
            self._allowed = count
            self._change.notify_all()

    def ended(self, count: int, within: float = 120.0) -> None:
        """Wait until so many requests have ended, well or not."""
        until(lambda: len(self.answers) + len(self.failures) >= count, within)

    def more(self, count: int) -> None:
        """Wait until so many more have ended."""
        self.ended(len(self.answers) + len(self.failures) + count)

    def _next(self) -> int | None:
        """Wait for the next number that may be sent; None: there is none any more."""
        with self._change:
            number = next(self._numbers)
            self._change.wait_for(lambda: number < self._allowed or self._allowed < 0)
            return None if self._allowed < 0 else number

    def _run(self) -> None:
        while (number := self._next()) is not None:
            try:
                self.answers[number] = self._send(number)
            except Exception as error:
                self.failures[number] = repr(error)

    def __enter__(self) -> Stream[Answer]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.allow(-math.inf)
        for thread in self._threads:
            thread.join()
