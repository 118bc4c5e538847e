"""The interface of all directories, and the thread that keeps what one of them says.

Answers come from memory: one thread follows the directory, so that looking an engine up never waits, and an outage
leaves the last answers in use.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import ClassVar

from kvferry._directory.listing import Listed, Listing
from kvferry._forks import OneProcess
from kvferry._logs import Log
from kvferry._threads import guarded, start_loop
from kvferry.errors import Closed, DirectoryUnavailable, EngineNotListed, KvferryError, WrongState

logger = Log(__name__)

FOLLOW_FIRST = 0.1
FOLLOW_LAST = 5.0
"""Shortest and longest seconds between attempts to follow a directory that cannot be read. Half of each is random, so
that a fleet does not come back in one instant."""

ANSWER_TIMEOUT = 5.0
"""Default seconds to wait for the first answer."""


class Directory(OneProcess, ABC):
    """Says at which node server an engine has its home, and which homes there are. `open_directory` makes one.

    A directory is followed by a thread of its own from the first call on. After that, answers come from memory, also
    while the directory cannot be reached.

    Threading: every method may be called from any thread.

    Attributes:
        name: the directory's URL, for messages.
        publishes: whether node servers can publish in it. The others are written by people or by Kubernetes.
    """

    publishes: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._answered = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listed: Listed | None = None
        self._problem = ""
        self._pause = FOLLOW_FIRST
        self._watches: dict[object, Callable[[Listed], object]] = {}
        self._notifying = threading.RLock()
        """Held while watches are called, so that they hear of changes one at a time and in order."""

    # For readers.

    def start(self) -> None:
        """Begin to follow the directory. Does not wait. Idempotent.

        Raises:
            Closed: the directory is closed.
            LimitReached: the system refused a thread.
        """
        with self._answered:
            if self._stop.is_set():
                raise Closed(f"the directory {self.name} is closed")
            if self._thread is None:
                self._thread = start_loop(self._turn, "kvferry-directory")

    def wait(self, timeout: float = ANSWER_TIMEOUT) -> bool:
        """Wait until the directory has answered once, at most `timeout` seconds. Returns whether it has."""
        self.start()
        with self._answered:
            self._answered.wait_for(lambda: self._listed is not None or self._stop.is_set(), timeout)
            return self._listed is not None

    def listed(self) -> Listed:
        """Return all that the directory says. Does not wait.

        Raises:
            DirectoryUnavailable: it has not answered yet.
            Closed: the directory is closed.
        """
        self.start()
        with self._answered:
            if self._listed is not None:
                return self._listed
            problem = self._problem or "it has not answered yet"
        raise unavailable(self.name, problem)

    def resolve(self, engine_id: str, incarnation: bytes = b"") -> Listing:
        """Return where an engine has its home. Does not wait.

        Args:
            engine_id: the engine.
            incarnation: which of several of that name is meant; empty: the one that was listed last.

        Raises:
            EngineNotListed: the directory does not list the engine.
            DirectoryUnavailable: it has not answered yet.
            Closed: the directory is closed.
        """
        found = self.listed().find(engine_id, incarnation)
        if found is None:
            message = f"engine {engine_id!r} is not listed in {self.name}"
            raise EngineNotListed(message, engine_id=engine_id, directory=self.name)
        return found

    def watch(self, changed: Callable[[Listed], object]) -> Callable[[], None]:
        """Call a function with all that the directory says: as soon as that is known, and after every change.

        Args:
            changed: called on the directory's thread, or at once on the caller's; must not block.

        Returns:
            A function that ends the watch.
        """
        key = object()
        with self._notifying:
            with self._answered:
                self._watches[key] = changed
                listed = self._listed
            if listed is not None:
                changed(listed)
        self.start()

        def end() -> None:
            with self._answered:
                self._watches.pop(key, None)

        return end

    # For node servers.

    def publish(self, home: str, engines: Collection[Listing], ttl: float) -> None:
        """List a home and its engines, and nothing else of this publisher, for `ttl` seconds. Waits.

        What was published before and is not named again is withdrawn.

        Args:
            home: ``host:port`` of the home.
            engines: its engines.
            ttl: seconds from now, or from the last `renew`, after which the directory forgets them by itself.

        Raises:
            DirectoryUnavailable: it could not be written; call it again.
            WrongState: this kind of directory is written by others.
        """
        raise self._written_by_others()

    def renew(self) -> None:
        """List what is published for another ttl. Waits. If the directory has forgotten it, publish it again.

        Raises:
            DirectoryUnavailable: it could not be written; call it again.
            WrongState: this kind of directory is written by others.
        """
        raise self._written_by_others()

    def withdraw(self) -> None:
        """Take back all that is published. Waits, at most for one call.

        Raises:
            DirectoryUnavailable: it could not be written; the listings end with their ttl.
            WrongState: this kind of directory is written by others.
        """
        raise self._written_by_others()

    def close(self) -> None:
        """End the thread and the connections. What is published stays until its ttl ends. Idempotent."""
        self._stop.set()
        self._interrupt()
        with self._answered:
            self._answered.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(ANSWER_TIMEOUT)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the kinds of directories.

    @abstractmethod
    def _follow(self) -> None:
        """Call `_learn` with all that the directory says, and after every change, until `_stop` is set; or raise."""

    def _interrupt(self) -> None:
        """Interrupt `_follow`, which `_stop` alone would not end soon."""

    def _learn(self, listed: Listed) -> None:
        """Take what the directory says now, and call the watches if it is new."""
        with self._notifying:
            with self._answered:
                changed = listed != self._listed
                self._listed, self._pause = listed, FOLLOW_FIRST
                again, self._problem = bool(self._problem), ""
                watches = list(self._watches.values()) if changed else []
                self._answered.notify_all()
            if again:
                logger.info("the directory %s answers again", self.name)
            for watch in watches:
                guarded(partial(watch, listed), f"a watch of the directory {self.name}")

    def _turn(self) -> bool:
        if self._stop.is_set():
            return False
        try:
            self._follow()
        except KvferryError as error:
            self._failed(error.values.get("problem", error.message))
        except Exception as error:
            logger.debug("following %s failed", self.name, exc_info=error)
            self._failed(repr(error))
        with self._answered:
            pause, self._pause = self._pause, min(2 * self._pause, FOLLOW_LAST)
        return not self._stop.wait(pause * random.uniform(0.5, 1.0))

    def _failed(self, problem: str) -> None:
        if self._stop.is_set():
            return
        with self._answered:
            first, self._problem = not self._problem, problem
            known = self._listed is not None
        if first:
            # Once per outage: nothing but discovery depends on it. Before the first answer callers get an error, and
            # need no second message.
            level = logging.WARNING if known else logging.INFO
            so_far = "what it said before stays in use" if known else "it has said nothing yet"
            logger.log(level, "the directory %s cannot be read: %s; %s", self.name, problem, so_far)

    def _written_by_others(self) -> WrongState:
        return WrongState(f"node servers do not publish in {self.name}: it is written by others", directory=self.name)


def unavailable(name: str, problem: str) -> DirectoryUnavailable:
    """Make the error for a directory that cannot be read or written."""
    return DirectoryUnavailable(f"the directory {name} is not available: {problem}", directory=name, problem=problem)
