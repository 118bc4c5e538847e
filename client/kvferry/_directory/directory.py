"""The interface of all directories, and the thread that follows a directory.

Answers come from memory, so that looking an engine up never waits, and the last answers stay in use during an outage.
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
"""Shortest and longest seconds between attempts to follow an unreadable directory. Half of each pause is random, so
that a fleet does not come back in one instant."""

ANSWER_TIMEOUT = 5.0
"""Default seconds to wait for the first answer."""


class Directory(OneProcess, ABC):
    """Lists the homes of a fleet, and the home of each engine. `open_directory` makes one.

    From the first call on, a thread follows the directory. Answers come from memory, also while the directory cannot be
    reached.

    Threading: every method may be called from any thread.

    Attributes:
        name: the directory's URL, for messages.
        publishes: whether node servers can publish in the directory. Other kinds are written by people or Kubernetes.
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
        """Held while watches are called, so that they receive changes one at a time and in order."""

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
        """Return the directory's content. Does not wait.

        Raises:
            DirectoryUnavailable: the directory has not answered yet.
            Closed: the directory is closed.
        """
        self.start()
        with self._answered:
            if self._listed is not None:
                return self._listed
            problem = self._problem or "it has not answered yet"
        raise unavailable(self.name, problem)

    def resolve(self, engine_id: str, incarnation: bytes = b"") -> Listing:
        """Return the listing of an engine; of several with its name, prefers the incarnation, then the newest. Does not
        wait.

        Raises:
            EngineNotListed: the directory does not list the engine.
            DirectoryUnavailable: the directory has not answered yet.
            Closed: the directory is closed.
        """
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
        """List a home, as ``host:port``, and its engines. Withdraws other earlier listings of this publisher. Waits.

        The directory forgets the listings `ttl` seconds after `publish` or the last `renew`.

        Raises:
            DirectoryUnavailable: the directory could not be written; call `publish` again.
            WrongState: node servers do not publish in this kind of directory.
        """
        raise self._written_by_others()

    def renew(self) -> None:
        """List everything published for another ttl; publish it again if the directory has forgotten it. Waits.

        Raises:
            DirectoryUnavailable: the directory could not be written; call `renew` again.
            WrongState: node servers do not publish in this kind of directory.
        """
        raise self._written_by_others()

    def withdraw(self) -> None:
        """Withdraw everything published. Waits, at most for one call.

        Raises:
            DirectoryUnavailable: the directory could not be written; the listings end with their ttl.
            WrongState: node servers do not publish in this kind of directory.
        """
        raise self._written_by_others()

    def close(self) -> None:
        """End the thread and the connections. Published listings stay until their ttl ends. Idempotent."""
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
        """Call `_learn` with the content, and again after every change, until `_stop` is set; or raise."""

    def _interrupt(self) -> None:
        """Interrupt `_follow`, if `_stop` alone would not end it soon."""

    def _learn(self, listed: Listed) -> None:
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
            # Once per outage: only discovery depends on the directory. Before the first answer callers get an error,
            # and need no warning in the log.
            level = logging.WARNING if known else logging.INFO
            so_far = "its last answer stays in use" if known else "it has not answered yet"
            logger.log(level, "the directory %s cannot be read: %s; %s", self.name, problem, so_far)

    def _written_by_others(self) -> WrongState:
        return WrongState(f"node servers do not publish in {self.name}: it is written by others", directory=self.name)


def unavailable(name: str, problem: str) -> DirectoryUnavailable:
    return DirectoryUnavailable(f"the directory {name} is not available: {problem}", directory=name, problem=problem)
