"""Lists a home and its engines in a directory while they live.

The event loop decides the listings; a thread writes them, and repeats failed writes. Nothing waits for a directory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping

from kvferry._directory.directory import Directory
from kvferry._directory.listing import MAX_NAME_BYTES, Listing
from kvferry.errors import KvferryError
from kvferry_server.home.home import Home
from kvferry_server.node.times import LISTING_POLL, WITHDRAW_PATIENCE

logger = logging.getLogger(__name__)

MODEL = "model"  # Key in an engine's identity whose value becomes a label
RETRY_FIRST = 0.2  # Shortest seconds between attempts to write. The pause doubles up to the time between renewals


class Listings:
    """The listings of one home in a directory, which end `ttl` seconds after their last renewal. `run` and `stop` are
    called on the home's event loop."""

    def __init__(self, directory: Directory, home: Home, labels: Mapping[str, str], ttl: float) -> None:
        self._directory = directory
        self._home = home
        self._labels = dict(labels)
        self._ttl = ttl
        self._news = threading.Condition()
        self._wanted: tuple[Listing, ...] = ()
        self._version = 0
        self._stopping = False
        self._done, self._failing = 0, False
        self._thread = threading.Thread(target=self._write, name="kvferry-listings", daemon=True)

    async def run(self) -> None:
        """Pass changed listings to the thread, until cancelled or until the home drains."""
        self._thread.start()
        while not self._home.draining:
            wanted = self._engines()
            if wanted != self._wanted or not self._version:
                with self._news:
                    self._wanted, self._version = wanted, self._version + 1
                    self._news.notify_all()
            await asyncio.sleep(LISTING_POLL)

    async def stop(self) -> None:
        """Withdraw all listings; waits at most `WITHDRAW_PATIENCE`. Idempotent."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, WITHDRAW_PATIENCE)
        await asyncio.to_thread(self._directory.close)

    def _engines(self) -> tuple[Listing, ...]:
        with self._home.turn():
            engines = [(engine.ref, engine.first) for engine in self._home.engines.engines()]
        listed = []
        for ref, first in engines:
            model = first.identity.get(MODEL, "") if first is not None else ""
            fits = model and model.isprintable() and len(model.encode()) <= MAX_NAME_BYTES
            labels = {**({MODEL: model} if fits else {}), **self._labels}
            listed.append(Listing(ref.engine_id, self._home.advertise, ref.incarnation, labels))
        return tuple(listed)

    def _write(self) -> None:
        """On the thread: write changes at once, repeat failed writes, and renew in time."""
        pause = 0.0
        while self._wait(pause):
            with self._news:
                wanted, version = self._wanted, self._version
            try:
                if version == self._done:
                    self._directory.renew()
                else:
                    self._directory.publish(self._home.advertise, wanted, self._ttl)
            except Exception as error:
                # Any error, such as a system that refuses threads: if this thread ended, so would the listings.
                if not self._failing:
                    # Once per outage: reads do not depend on it.
                    unexpected = None if isinstance(error, KvferryError) else error
                    logger.warning("engines are not listed: %s; trying again", error, exc_info=unexpected)
                pause = min(2 * pause if self._failing else RETRY_FIRST, self._ttl / 3)
                self._failing = True
                continue
            if self._failing:
                logger.info("engines are listed again in %s", self._directory.name)
            self._done, self._failing, pause = version, False, self._ttl / 3
        if not self._done:
            return
        try:
            self._directory.withdraw()
        except Exception as error:
            logger.warning("the listings of this server end with their ttl, %g s: %s", self._ttl, error)

    def _wait(self, pause: float) -> bool:
        """Wait until there is something to write, at most `pause` seconds (0: no limit). Returns False to stop."""
        with self._news:
            self._news.wait_for(
                lambda: self._stopping or (not self._failing and self._version != self._done), pause or None
            )
            return not self._stopping
