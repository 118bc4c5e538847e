"""What directories list, their interface, and the thread that follows a directory. Answers come from memory: looking an
engine up never waits, and the last answers stay in use during an outage."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom
from typing import Any, ClassVar

from kvferry._arguments import instance, mapping, string_map, text
from kvferry._forks import Closing
from kvferry._logs import Log
from kvferry._threads import guarded, start_thread
from kvferry._wire.authority import INCARNATION_BYTES
from kvferry._wire.channel import parse_address
from kvferry.errors import Closed, DirectoryUnavailable, EngineNotListed, InvalidField, KvferryError, WrongState

logger = Log(__name__)

MAX_NAME_BYTES = 256  # Most bytes of an engine_id, of a home, and of the name and the value of a label
MAX_LABELS = 16
MAX_ENTRY_BYTES = 16 * 1024  # Most bytes of an entry that is read from a directory: more than any valid entry has

FOLLOW_FIRST = 0.1
FOLLOW_LAST = 5.0
"""Shortest and longest seconds between attempts to read a directory. Half is random: no fleet comes back at once."""
_RANDOM = SystemRandom()
ANSWER_TIMEOUT = 5.0  # Default seconds to wait for the first answer


@dataclass(frozen=True, slots=True)
class Listing:
    """The home of one engine. All fields are public. Raises `InvalidField` for a field of the wrong type or value.

    Attributes:
        engine_id: the engine.
        home: ``host:port`` at which other hosts reach the engine's home.
        incarnation: tells apart two engines of one name; empty: not known.
        labels: for people and routers, such as ``{"role": "prefill", "model": "llama3-70b"}``.
    """

    engine_id: str
    home: str
    incarnation: bytes = b""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 1 <= len(text("engine_id", self.engine_id).encode()) <= MAX_NAME_BYTES:
            raise InvalidField("engine_id", self.engine_id, f"1 to {MAX_NAME_BYTES} bytes")
        if len(instance("incarnation", self.incarnation, bytes, "bytes")) not in (0, INCARNATION_BYTES):
            raise InvalidField("incarnation", self.incarnation, f"{INCARNATION_BYTES} bytes, or none")
        object.__setattr__(self, "home", checked_home(self.home))
        object.__setattr__(self, "labels", checked_labels(self.labels))

    def to_json(self) -> bytes:
        """Encode the listing as directories keep it."""
        said = {"engine_id": self.engine_id, "home": self.home, "labels": dict(self.labels)}
        if self.incarnation:
            said["incarnation"] = self.incarnation.hex()
        return json.dumps(said, sort_keys=True).encode()

    @classmethod
    def from_json(cls, encoded: bytes) -> Listing:
        """Decode a listing, and ignore fields that a later version has added. Raises `InvalidField`."""
        if len(encoded) > MAX_ENTRY_BYTES:
            raise InvalidField("listing", f"{len(encoded)} bytes", f"at most {MAX_ENTRY_BYTES}")
        try:
            said: Any = mapping("listing", json.loads(encoded), "a JSON object")
            incarnation = bytes.fromhex(text("incarnation", said.get("incarnation", "")))
        except InvalidField:
            raise
        except (ValueError, RecursionError):
            raise InvalidField("listing", f"{len(encoded)} bytes", "a JSON object") from None
        return cls(said.get("engine_id"), said.get("home"), incarnation, said.get("labels", {}))


@dataclass(frozen=True, slots=True)
class Listed:
    """The content of a directory at one time.

    Attributes:
        homes: ``host:port`` of every node server, with and without engines.
        engines: the engines, the last listed at the end. An engine may be listed twice, e.g. while its old home has not
            noticed yet that the engine moved.
    """

    homes: frozenset[str] = frozenset()
    engines: tuple[Listing, ...] = ()

    def find(self, engine_id: str, incarnation: bytes = b"") -> Listing | None:
        """Return the listing of this incarnation of an engine, else the engine's newest listing, else None. Another
        incarnation's home helps, too: it answers with a typed error that the engine has restarted."""
        found = [listing for listing in self.engines if listing.engine_id == engine_id]
        same = [listing for listing in found if incarnation and listing.incarnation == incarnation]
        return next(reversed(same or found), None)

    def covers(self, home: str) -> bool:
        """Whether a listed home has this address."""
        return home in self.homes or any(listing.home == home for listing in self.engines)


def checked_home(home: str) -> str:
    """Return the address of a home if other hosts can connect to it; else raises `InvalidField`."""
    address = parse_address(text("home", home), "home")
    if address.is_unix or not address.port or len(home.encode()) > MAX_NAME_BYTES or not home.isprintable():
        raise InvalidField("home", home, f"host:port, as other hosts reach it, in at most {MAX_NAME_BYTES} bytes")
    return str(address)


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels if they are few, short and printable; else raises `InvalidField`."""
    checked = dict(string_map("labels", labels))
    if len(checked) > MAX_LABELS:
        raise InvalidField("labels", f"{len(checked)} labels", f"at most {MAX_LABELS}")
    for part in (*checked, *checked.values()):
        if len(part.encode()) > MAX_NAME_BYTES or not part.isprintable():
            raise InvalidField("labels", part, f"printable names and values of at most {MAX_NAME_BYTES} bytes")
    return checked


class Directory(Closing, ABC):
    """Lists the homes of a fleet, and the home of each engine. `open_directory` makes one.

    From the first call on, a thread follows the directory. Answers come from memory, also while the directory cannot be
    reached. Every method may be called from any thread. `publish`, `renew` and `withdraw` raise `DirectoryUnavailable`
    if the directory could not be written, and `WrongState` if node servers do not publish in this kind of directory.

    Attributes:
        name: the directory's URL, for messages.
        publishes: whether node servers can publish in the directory. Files are written by people.
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
        """Begin to follow the directory. Does not wait. Idempotent. Raises `Closed`, or `LimitReached` by threads."""
        if self._thread is None:
            with self._changed:
                if self._thread is None and not self._closed:
                    self._thread = start_thread(self._run, "kvferry-directory")
        if self._closed:
            raise Closed(f"the directory {self.name} is closed")

    def wait(self, timeout: float = ANSWER_TIMEOUT) -> bool:
        """Wait until the directory has answered once, at most `timeout` seconds. Returns whether it has."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._listed is not None or self._closed, timeout)
            return self._listed is not None

    def listed(self) -> Listed:
        """Return the content. Does not wait. Raises `DirectoryUnavailable` if it has not answered yet, or `Closed`."""
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
        """Call `changed` with the directory's content as soon as that is known, and after every change. It must not
        block; it is called on the directory's thread, and the first time perhaps on the caller's. Returns a function
        that ends the watch."""
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
        `DirectoryUnavailable`, call `publish` again."""
        raise self._written_by_others()

    def renew(self) -> None:
        """List everything published for another ttl, even if the directory has forgotten it. Waits. After
        `DirectoryUnavailable`, call `renew` again."""
        raise self._written_by_others()

    def withdraw(self) -> None:
        """Withdraw everything published. Waits, at most for one call. If it fails, the listings end with their ttl."""
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

    def _run(self) -> None:
        while not self._closed:
            try:
                pause = self._follow()
            except BaseException as error:
                if not self._closed:
                    self._failed(error)
                pause, self._pause = self._pause * _RANDOM.uniform(0.5, 1.0), min(2 * self._pause, FOLLOW_LAST)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)

    def _failed(self, error: BaseException) -> None:
        first = not self._problem
        if isinstance(error, KvferryError):
            self._problem = error.values.get("problem", error.message)
        else:
            logger.debug("following %s failed", self.name, exc_info=error)
            self._problem = repr(error)
        if first:
            # Once per outage: only discovery depends on it. Before the first answer callers get an error anyway.
            level = logging.INFO if self._listed is None else logging.WARNING
            so_far = "it has not answered yet" if self._listed is None else "its last answer stays in use"
            logger.log(level, "the directory %s cannot be read: %s; %s", self.name, self._problem, so_far)

    def _written_by_others(self) -> WrongState:
        return WrongState(f"node servers do not publish in {self.name}: it is written by others", directory=self.name)


def unavailable(name: str, problem: str) -> DirectoryUnavailable:
    return DirectoryUnavailable(f"the directory {name} is not available: {problem}", directory=name, problem=problem)
