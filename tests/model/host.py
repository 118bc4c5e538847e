"""The shipped home: domain, answers to readers, Watches and the servicer of Notify, without a network and an event
loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from kvferry._clock import from_duration, to_duration
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.times import Times
from kvferry_server.domain.values import NOBODY, EngineRef
from kvferry_server.home.home import Home, Waker, Wakeups
from kvferry_server.home.time_slices import TimeSlices
from kvferry_server.servicers import decode
from kvferry_server.servicers.introspection import Introspection
from kvferry_server.servicers.kv_transfer import read_blocks
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Caller, Relays
from kvferry_server.servicers.watch import watch
from tests.model.clocks import PartyClock

if TYPE_CHECKING:
    from tests.model.network import Pipe

T = TypeVar("T")

ADVERTISE = "home.example:7423"
TIMES = Times(ttl=3, max_ttl=4, engine_ttl=1, hold=2.5, final=12, max_wait=4, retire=40)


class _Parked:
    def __await__(self) -> Generator[None, None, None]:
        yield


class _ParkedWaker(Waker):
    async def wait(self, seconds: float | None = None) -> Literal[True]:
        await _Parked()
        return True


class _ParkedWakeups(Wakeups):
    """Wakers that never wake: `pump` looks at every waiting stream after each change."""

    @contextmanager
    def watching(self, topic: object) -> Iterator[Waker]:
        yield _ParkedWaker()


class Pulled(Generic[T]):
    """A server stream that is pulled by hand instead of by an event loop."""

    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._step: Any = None
        self.ended = False
        self.error: KvferryError | None = None

    def pull(self) -> T | None:
        """The next message; None if the stream waits for something, or has ended."""
        if self.ended:
            return None
        if self._step is None:
            self._step = self._stream.__anext__()
        try:
            self._step.send(None)
        except StopIteration as message:
            self._step = None
            return cast(T, message.value)
        except StopAsyncIteration:
            self.ended = True
        except KvferryError as error:
            self.ended, self.error = True, error
        return None

    def close(self) -> None:
        """Cancel the stream where it waits, as gRPC does."""
        if self.ended:
            return
        self.ended = True
        try:
            if self._step is not None:
                self._step.throw(asyncio.CancelledError())
            else:
                self._stream.aclose().send(None)
        except (StopIteration, asyncio.CancelledError):
            return


class _NoLoop(TimeSlices):
    """Time slices without an event loop: each call is handled to its end."""

    @property
    def over(self) -> bool:
        return False

    async def begin(self, host: str, *, short: bool) -> None:
        return


class Host:
    """One start of the node server."""

    def __init__(self, clock: PartyClock) -> None:
        self.clock = clock
        self.home = Home(clock, TIMES, ADVERTISE)
        self.home.wakeups = _ParkedWakeups()
        self.home.time_slices = _NoLoop()
        self.heard: deque[pb.NotifyRequest | pb.ReadBlocksRequest | pb.WatchRequest] = deque(maxlen=12)
        """The last requests."""
        self.renewed_at: dict[bytes, float] = {}
        """By lease_id, time of the last renewal."""
        self.declined: dict[str, float] = {}
        """By router_key, time of the first decline."""
        self.withdrawn: set[tuple[EngineRef, int]] = set()
        """Publications that an operator has aborted. Their source gets only the release event, so that only this start
        of the home knows of the abort. After a restart the source may offer them again: nothing was released, and the
        blocks have not changed."""

    @property
    def published(self) -> list[pb.Publish]:
        """The last steps that sources have published or repeated."""
        said = (request.notifications for request in self.heard if isinstance(request, pb.NotifyRequest))
        return [found.publish for each in said for found in each if found.WhichOneof("kind") == "publish"]

    def tick(self) -> None:
        """Fire the timer."""
        with self.home.turn():
            pass

    def notify(self, request: pb.NotifyRequest) -> pb.NotifyResponse:
        for notification in request.notifications:
            if notification.WhichOneof("kind") == "renew":
                self.renewed_at[notification.renew.lease_id] = self.clock.now()
        self.heard.append(request)
        return self.lie(request)

    def lie(self, request: pb.NotifyRequest) -> pb.NotifyResponse:
        """As `notify`, but renewals in it are not expected to be accepted."""
        # `notify` never waits here, see `_NoLoop`.
        relays = Relays(self.home.advertise, None, anywhere=False)
        answering = notify(self.home, relays, request, 0.0, Caller("", NOBODY))
        while True:
            try:
                answering.send(None)
            except StopIteration as end:
                return cast(pb.NotifyResponse, end.value)

    def list_transfers(self, request: ipb.ListTransfersRequest) -> ipb.ListTransfersResponse:
        """List reads, as the servicer does."""
        listing = Introspection(self.home, cast(Any, None), {}).ListTransfers(request, cast(Any, None))
        try:
            listing.send(None)
        except StopIteration as answer:
            return cast(ipb.ListTransfersResponse, answer.value)
        raise RuntimeError("a listing waits for something")

    def register(self, registration: Registration, secret: bytes) -> float:
        """Register a rank, as the servicer does. Returns `reuse_after` in seconds."""
        home = self.home
        home.check_not_draining()
        with home.turn():
            home.engines.register(registration, secret)
            return from_duration(to_duration(home.engines.reuse_after(registration.engine)))

    def read_blocks(self, request: pb.ReadBlocksRequest) -> Pulled[pb.ReadBlocksResponse]:
        """A call that may wait: a stream of one message."""
        self.heard.append(request)
        home, asked = self.home, decode.lease_request(request, self.home.limits.ranks, NOBODY)
        wait = min(from_duration(request.wait) or TIMES.max_wait, TIMES.max_wait)

        async def answers() -> AsyncGenerator[pb.ReadBlocksResponse, None]:
            answer = await read_blocks(home, asked, wait, request.lease_id, request.next_step)
            yield pb.ReadBlocksResponse.FromString(answer)

        return Pulled(answers())

    def watch(self, request: pb.WatchRequest) -> Pulled[pb.WatchResponse]:
        self.heard.append(request)
        home = self.home
        stream = watch(
            home, decode.process(request), request.session_secret, request.resume_epoch, request.resume_sequence
        )
        return Pulled(stream)

    def pump(self, pipes: list[Pipe[Any]]) -> None:
        """Let all streams send their messages: at the end of a turn none has unsent messages."""
        for pipe in list(pipes):
            server = pipe.server
            if server is None or pipe.ended:
                continue
            while (message := server.pull()) is not None:
                if pipe.listening:
                    pipe.messages.append(message)
            if server.ended:
                pipe.ended, pipe.error = True, server.error
