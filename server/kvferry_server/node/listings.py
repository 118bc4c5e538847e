"""Lists a home and its engines in a directory while they live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from kvferry._directory.directory import MAX_NAME_BYTES, Directory, Listing
from kvferry.errors import KvferryError
from kvferry_server.home.home import Home
from kvferry_server.node.limits import LISTING_POLL, WITHDRAW_PATIENCE

logger = logging.getLogger(__name__)

MODEL = "model"  # Key in an engine's identity whose value becomes a label
RETRY_FIRST = 0.2  # Shortest seconds between attempts to write. The pause doubles up to the time between renewals


class Listings:
    """The listings of one home in a directory, from construction until `stop`; they end `ttl` seconds after their last
    renewal. Belongs to the home's event loop, of which no other task waits for the directory."""

    def __init__(self, directory: Directory, home: Home, labels: Mapping[str, str], ttl: float) -> None:
        self._directory = directory
        self._home = home
        self._labels = labels
        self._ttl = ttl
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(), name="kvferry-listings")

    async def stop(self) -> None:
        """Withdraw all listings; waits at most `WITHDRAW_PATIENCE`. Idempotent."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        try:
            await asyncio.wait([self._running], timeout=WITHDRAW_PATIENCE)
        finally:
            # Also if the process ends at once, which waits for the threads of calls: this ends a call that hangs.
            await asyncio.to_thread(self._directory.close)
            self._running.cancel()
        await asyncio.wait([self._running])

    def _engines(self) -> tuple[Listing, ...]:
        with self._home.turn():
            engines = [(engine.ref, engine.first) for engine in self._home.engines.engines()]
        listed = []
        for ref, first in engines:
            model = first.identity.get(MODEL, "") if first is not None else ""
            fits = model and model.isprintable() and len(model.encode()) <= MAX_NAME_BYTES
            labels = {MODEL: model, **self._labels} if fits else self._labels
            listed.append(Listing(ref.engine_id, self._home.advertise, ref.incarnation, labels))
        return tuple(listed)

    async def _run(self) -> None:
        """Write changes at once, repeat failed writes, and renew in time, until `stop`; then withdraw."""
        loop = asyncio.get_running_loop()
        wanted: tuple[Listing, ...] = ()
        listed: tuple[Listing, ...] | None = None  # None: unknown, at the start and after a failed attempt
        failing, pause, due = False, 0.0, 0.0
        while not self._stopping.done():
            # A draining home keeps its listings until it stops.
            if not self._home.draining:
                wanted = self._engines()
            if loop.time() >= due or (wanted != listed and not failing):
                publish = partial(self._directory.publish, self._home.advertise, wanted, self._ttl)
                try:
                    await asyncio.to_thread(publish if wanted != listed else self._directory.renew)
                except Exception as error:
                    # Any error, such as a system that refuses threads: if this task ended, so would the listings.
                    if not failing:
                        # Once per outage: reads do not depend on it.
                        unexpected = None if isinstance(error, KvferryError) else error
                        logger.warning("engines are not listed: %s; trying again", error, exc_info=unexpected)
                    pause = min(2 * pause if failing else RETRY_FIRST, self._ttl / 3)
                    failing, listed = True, None
                else:
                    if failing:
                        logger.info("engines are listed again in %s", self._directory.name)
                    failing, listed, pause = False, wanted, self._ttl / 3
                due = loop.time() + pause
            await asyncio.wait([self._stopping], timeout=min(LISTING_POLL, pause))
        try:
            await asyncio.to_thread(self._directory.withdraw)
        except Exception as error:
            logger.warning("the listings of this server end with their ttl, %g s: %s", self._ttl, error)
