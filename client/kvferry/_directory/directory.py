"""The interface of all directories, and the thread that follows a directory.

Answers come from memory, so that looking an engine up never waits, and the last answers stay in use during an outage.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from random import Random
from typing import ClassVar

from kvferry._directory.listing import Listed, Listing
from kvferry._forks import Closing
from kvferry._logs import Log
from kvferry._threads import guarded, start_loop
from kvferry.errors import Closed, DirectoryUnavailable, EngineNotListed, KvferryError, WrongState

logger = Log(__name__)

FOLLOW_FIRST = 0.1
FOLLOW_LAST = 5.0
"""Shortest and longest seconds between attempts to follow an unreadable directory. Half of each pause is random, so
that a fleet does not come back in one instant."""
_RANDOM = Random()
ANSWER_TIMEOUT = 5.0  # Default seconds to wait for the first answer


class Directory(Closing, ABC):
    """Lists the homes of a fleet, and the home of each engine. `open_directory` makes one.

    From the first call on, a thread follows the directory. Answers come from memory, also while the directory cannot be
    reached. Every method may be called from any thread.

    `publish`, `renew` and `withdraw` raise `DirectoryUnavailable` if the directory could not be written, and
    `WrongState` if node servers do not publish in this kind of directory.

    Attributes:
        name: the directory's URL, for messages.
        publishes: whether node servers can publish in the directory. Other kinds are written by people or Kubernetes.
    """

    publishes: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        """Also held while watches are called, so that they receive changes one at a time and in order."""
        self._closed = False
        self._thread: threading.Thread | None = None
        # The thread replaces these. They are read without the lock: a lookup never waits for a watch.
        self._listed: Listed | None = None
        self._problem = ""
        self._pause = FOLLOW_FIRST
        self._watches: dict[object, Callable[[Listed], object]] = {}

    # For readers.

    def start(self) -> None:
        """Begin to follow the directory. Does not wait. Idempotent. Raises `Closed`, or `LimitReached` if the system
        refused a thread."""
        if self._thread is None:
            with self._changed:
                if self._thread is None and not self._closed:
                    self._thread = start_loop(self._turn, "kvferry-directory")
        if self._closed:
            raise Closed(f"the directory {self.name} is closed")

    def wait(self, timeout: float = ANSWER_TIMEOUT) -> bool:
        """Wait until the directory has answered once, at most `timeout` seconds. Returns whether it has."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._listed is not None or self._closed, timeout)
            return self._listed is not None

    def listed(self) -> Listed:
        """Return the directory's content. Does not wait. Raises `DirectoryUnavailable` if it has not answered yet, or
        `Closed`."""
        self.start()
        problem, listed = self._problem, self._listed
        if listed is None:
            raise unavailable(self.name, problem or "it has not answered yet")
        return listed

    def resolve(self, engine_id: str, incarnation: bytes = b"") -> Listing:
        """Return the listing of an engine; of several with its name, prefers the incarnation, then the newest. Does not
        wait. Raises `EngineNotListed`, `DirectoryUnavailable` if the directory has not answered yet, or `Closed`."""
        found = self.listed().find(engine_id, incarnation)
        if found is None:
            message = f"engine {engine_id!r} is not listed in {self.name}"
            raise EngineNotListed(message, engine_id=engine_id, directory=self.name)
        return found

    def watch(self, changed: Callable[[Listed], object]) -> Callable[[], None]:
        """Call `changed` with the directory's content as soon as that is known, and after every change.

        `changed` must not block; it is called on the directory's thread, and the first time perhaps on the caller's.
        Returns a function that ends the watch.
        """
        key = object()
        with self._changed:
            self._watches[key] = changed
            if self._listed is not None:
                changed(self._listed)
        self.start()

        def end() -> None:
            self._watches.pop(key, None)

        return end

    # For node servers.

    def publish(self, home: str, engines: Collection[Listing], ttl: float) -> None:
        """List a home, as ``host:port``, and its engines. Withdraws other earlier listings of this publisher. Waits.

        The directory forgets the listings `ttl` seconds after `publish` or the last `renew`. After
        `DirectoryUnavailable`, call `publish` again.
        """
        raise self._written_by_others()

    def renew(self) -> None:
        """List everything published for another ttl; publish it again if the directory has forgotten it. Waits. After
        `DirectoryUnavailable`, call `renew` again."""
        raise self._written_by_others()

    def withdraw(self) -> None:
        """Withdraw everything published. Waits, at most for one call. After `DirectoryUnavailable`, the listings end
        with their ttl."""
        raise self._written_by_others()

    def close(self) -> None:
        """End the thread and the connections. Published listings stay until their ttl ends. Idempotent."""
        self._closed = True
        self._interrupt()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(ANSWER_TIMEOUT)

    # For the kinds of directories.

    @abstractmethod
    def _follow(self) -> float:
        """Call `_learn` with the content; perhaps go on with every change, until `_interrupt`. Returns the seconds
        until the next call; after an error, the next call comes after a pause."""

    def _interrupt(self) -> None:
        """End a `_follow` that lasts: the directory is closed."""

    def _learn(self, listed: Listed) -> None:
        with self._changed:
            changed = listed != self._listed
            self._listed, self._pause = listed, FOLLOW_FIRST
            again, self._problem = bool(self._problem), ""
            self._changed.notify_all()
            if again:
                logger.info("the directory %s answers again", self.name)
            for watch in tuple(self._watches.values()) if changed else ():
                guarded(partial(watch, listed), f"a watch of the directory {self.name}")

    def _turn(self) -> bool:
        try:
            pause = self._follow()
        except Exception as error:
            if not isinstance(error, KvferryError):
                logger.debug("following %s failed", self.name, exc_info=error)
            self._failed(error)
            pause, self._pause = self._pause * _RANDOM.uniform(0.5, 1.0), min(2 * self._pause, FOLLOW_LAST)
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, pause)

    def _failed(self, error: Exception) -> None:
        if self._closed:
            return
        first = not self._problem
        self._problem = error.values.get("problem", error.message) if isinstance(error, KvferryError) else repr(error)
        if first:
            # Once per outage: only discovery depends on the directory. Before the first answer callers get an error,
            # and need no warning in the log.
            level = logging.INFO if self._listed is None else logging.WARNING
            so_far = "it has not answered yet" if self._listed is None else "its last answer stays in use"
            logger.log(level, "the directory %s cannot be read: %s; %s", self.name, self._problem, so_far)

    def _written_by_others(self) -> WrongState:
        return WrongState(f"node servers do not publish in {self.name}: it is written by others", directory=self.name)


def unavailable(name: str, problem: str) -> DirectoryUnavailable:
    return DirectoryUnavailable(f"the directory {name} is not available: {problem}", directory=name, problem=problem)
