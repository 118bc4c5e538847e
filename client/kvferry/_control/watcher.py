"""The Watch of one process: shows its node server that the process is alive, and receives events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvferry._control.backoff import SILENCE, Backoff
from kvferry._control.connection import Control
from kvferry._logs import Log
from kvferry._loop import Loop, Signal
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import (
    Closed,
    ContractDiffers,
    EngineUnknown,
    InvalidInput,
    KvferryError,
    NotFound,
    Refused,
    Unavailable,
    Unreachable,
)
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)


class Watcher:
    """Keeps a Watch open: resumes the Watch after every loss, until it is closed or refused for good. Belongs to the
    client's event loop; `failure` may be used on any thread. `opened` is the first event of the last Watch.

    `request` is changed by the watcher; `on_event` gets the events, one at a time. If it raises, the events after that
    one are handled, and then the Watch is opened again for its full state, which includes that of the failed event.
    """

    def __init__(
        self,
        loop: Loop,
        control: Control,
        request: pb.WatchRequest,
        on_event: Callable[[pb.WatchResponse], Awaitable[None]],
        name: str,
    ) -> None:
        self._loop = loop
        self._control = control
        self._request = request
        self._on_event = on_event
        self._name = name
        self._news = Signal(loop)
        self._task: asyncio.Task[None] | None = None
        self._ended = self._synced = False
        self._failure: KvferryError | None = None
        self.opened: pb.WatchOpened | None = None
        self._missed = False
        """Whether the handler has raised, so that the full state must be fetched again."""
        self._again_after = 0.0
        """Seconds after which to fetch the full state, according to the handler's error."""
        self._backoff = Backoff()

    async def open(self, timeout: float) -> pb.WatchOpened:
        """Start, and wait at most `timeout` seconds for the full state. Returns the first event of the Watch; raises
        the error with which the node server refused, or could not be reached."""
        began = self._loop.now()
        deadline, warn_at = began + timeout, began + SILENCE
        self._task = self._loop.spawn_turns(self._turn, f"the watch of {self._name}")
        self._task.add_done_callback(self._end)
        try:
            while not self._synced and not self._ended and self._loop.now() < deadline:
                await self._news.wait(min(deadline, warn_at))
                if not self._synced and self._loop.now() >= warn_at:
                    warn_at, failure = deadline, self._failure
                    reason = failure.message if failure is not None else "there is no answer yet"
                    message = "still waiting for the Watch of %s at %s: %s"
                    logger.warning(message, self._name, self._control.address, reason)
        except BaseException:
            # The caller would not close the Watch.
            self._task.cancel()
            raise
        if self._synced and self.opened is not None:
            return self.opened
        failure = self._failure
        await self.close()
        raise failure or Unreachable(
            f"{self._control.address} did not open a Watch within {timeout} s", address=self._control.address
        )

    @property
    def failure(self) -> KvferryError | None:
        """The error with which the Watch ended for good, or a `ContractDiffers` with which it cannot be opened now."""
        failure = self._failure
        return failure if self._ended or isinstance(failure, ContractDiffers) else None

    async def close(self) -> None:
        """End the Watch. Idempotent."""
        # Not kept: the traceback of its end would keep the stream.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _turn(self) -> bool:
        """Follow one Watch, and pause; returns whether to open another Watch."""
        try:
            await self._follow()
            pause = self._backoff.next()
        except KvferryError as error:
            self._warn(error)
            # The error's traceback would keep the stream.
            self._failure = error.with_traceback(None)
            if self._is_refusal(error):
                return False
            pause = self._backoff.next(error.retry_after)
        await asyncio.sleep(pause)
        return True

    def _end(self, _: object) -> None:
        self._ended = True
        self._news.set()

    def _warn(self, error: KvferryError) -> None:
        """Warn of an error other than an unreachable node server or the client being closed; once while it stays the
        same."""
        if isinstance(error, Closed):
            return
        if self._is_refusal(error):
            logger.warning("the watch of %s at %s ended: %s", self._name, self._control.address, error)
        elif not error.retryable and type(self._failure) is not type(error):
            message = "the watch of %s at %s was interrupted and is opened again: %s"
            logger.warning(message, self._name, self._control.address, error)

    def _is_refusal(self, error: KvferryError) -> bool:
        """Return whether the node server has refused the Watch for good. Not a refusal is an internal error of the node
        server, or an answer that gRPC could not decode. For a Watch that was open before, a home that does not know the
        engine is none either: the home has restarted, or was cut off, and the engine's scheduler may be the last to
        come back. Nor is a node server of another release: its operator may go back to the old release, and to start an
        engine takes minutes."""
        if isinstance(error, EngineUnknown | ContractDiffers) and self._synced:
            return False
        return not error.retryable and isinstance(error, (InvalidInput, Refused, NotFound, Closed))

    async def _follow(self) -> None:
        """Follow one Watch until it ends, or until its full state is complete after the handler has raised."""
        if self._missed:
            self._request.resume_epoch, self._request.resume_sequence = b"", 0
            self._missed, self._again_after = False, 0.0
        synced = False
        async with contextlib.aclosing(self._control.watch(self._request)) as messages:
            async for message in messages:
                kind = message.WhichOneof("event")
                if kind == "opened":
                    self.opened = message.opened
                await self._handle(message)
                if self._request.resume_epoch != message.home_epoch:
                    # Another home, or this one after a restart: its sequence numbers start again.
                    self._request.resume_epoch = message.home_epoch
                    self._request.resume_sequence = 0
                self._request.resume_sequence = max(message.sequence, self._request.resume_sequence)
                synced |= kind == "synced" or (kind == "opened" and message.opened.resumed)
                if synced and self._missed:
                    missed = f"events of {self._name} at {self._control.address} could not be handled"
                    raise Unavailable(missed, retry_after=self._again_after)
                if synced:
                    self._failure = None
                    self._backoff.reset()
                    if not self._synced:
                        self._synced = True
                        self._news.set()

    async def _handle(self, message: pb.WatchResponse) -> None:
        try:
            await self._on_event(message)
        except KvferryError as error:
            self._missed, self._again_after = True, max(self._again_after, error.retry_after or 0.0)
            logger.warning("event %s of %s could not be handled: %s", message.WhichOneof("event"), self._name, error)
        except Exception:
            self._missed = True
            logger.exception("event %s of %s could not be handled", message.WhichOneof("event"), self._name)


def rank_watcher(
    loop: Loop, control: Control, token: EngineToken, rank: int, need_resync: Callable[[], Awaitable[None]]
) -> Watcher:
    """Return a Watch, still to be opened, by which the node server knows that a rank's process is alive. For processes
    without the engine's session, which has a Watch of its own. `need_resync` is called when the node server has lost
    its record of the rank."""
    request = pb.WatchRequest(
        engine=engine_ref(token),
        session_secret=token.session_secret,
        role=pb.WATCH_ROLE_RANK,
        rank=rank,
        home=token.home,
    )

    async def on_event(message: pb.WatchResponse) -> None:
        if message.WhichOneof("event") == "synced" and message.synced.need_resync:
            await need_resync()

    return Watcher(loop, control, request, on_event, f"{token.engine_id}-{rank}")
