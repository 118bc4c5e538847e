"""The home as it is shipped: domain, answers to readers, Watches and the notifications' servicer, without a network and
an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from kvferry._clock import from_duration, to_duration
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import NOBODY, EngineRef
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.times import Times
from kvferry_server.home.blocks import ReadAnswer, read_blocks
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import TimeSlices
from kvferry_server.home.wakeups import Waker, Wakeups
from kvferry_server.home.watch import watch
from kvferry_server.servicers import decode, encode
from kvferry_server.servicers.introspection import Introspection
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Caller, Relays
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
    """A stream that waits is looked at again whenever the home has done something."""

    @contextmanager
    def watching(self, topic: object) -> Iterator[Waker]:
        yield _ParkedWaker()


class Pulled(Generic[T]):
    """A server stream that is pulled by hand instead of by an event loop."""

    def __init__(self, stream: AsyncGenerator[Any, None], encoded: Callable[[Any], T]) -> None:
        self._stream = stream
        self._encoded = encoded
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
            return self._encoded(message.value)
        except StopAsyncIteration:
            self.ended = True
        except KvferryError as error:
            self.ended, self.error = True, error
        return None

    def close(self) -> None:
        """As gRPC does: where the stream waits, it is cancelled."""
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
    """No event loop that calls would share: each is handled to its end."""

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
        """What parties have said lately."""
        self.renewed_at: dict[bytes, float] = {}
        """When a renewal of each lease was heard."""
        self.declined: dict[str, float] = {}
        """When a router's decline was first heard, by the name in its reference."""
        self.withdrawn: set[tuple[EngineRef, int]] = set()
        """Publications that an operator has aborted. Their source hears only of the release; so this start knows of it,
        and after a restart the source may offer them again: nothing was released, and its blocks have not changed."""

    @property
    def published(self) -> list[pb.Publish]:
        """What sources have published lately, or told again."""
        said = (request.notifications for request in self.heard if isinstance(request, pb.NotifyRequest))
        return [found.publish for each in said for found in each if found.WhichOneof("kind") == "publish"]

    def tick(self) -> None:
        """The timer fires."""
        with self.home.turn():
            pass

    def notify(self, request: pb.NotifyRequest) -> pb.NotifyResponse:
        for notification in request.notifications:
            if notification.WhichOneof("kind") == "renew":
                self.renewed_at[notification.renew.lease_id] = self.clock.now()
        self.heard.append(request)
        return self.lie(request)

    def lie(self, request: pb.NotifyRequest) -> pb.NotifyResponse:
        """As `notify`, from a party that nobody believes to have renewed anything."""
        # Nothing in it waits, see `_NoLoop`.
        relays = Relays(self.home.advertise, None, anywhere=False)
        answering = notify(self.home, relays, request, 0.0, Caller("", NOBODY))
        while True:
            try:
                answering.send(None)
            except StopIteration as end:
                return cast(pb.NotifyResponse, end.value)

    def list_transfers(self, request: ipb.ListTransfersRequest) -> ipb.ListTransfersResponse:
        """As the servicer does."""
        listing = Introspection(self.home, cast(Any, None), {}).ListTransfers(request, cast(Any, None))
        try:
            listing.send(None)
        except StopIteration as answer:
            return cast(ipb.ListTransfersResponse, answer.value)
        raise RuntimeError("a listing waits for something")

    def register(self, registration: Registration, secret: bytes) -> float:
        """As the servicer does; seconds of `reuse_after`."""
        home = self.home
        home.check_not_draining()
        with home.turn():
            home.register(registration, secret)
            return from_duration(to_duration(home.reuse_after(registration.engine)))

    def read_blocks(self, request: pb.ReadBlocksRequest) -> Pulled[pb.ReadBlocksResponse]:
        """A call that may wait: a stream of one message."""
        self.heard.append(request)
        home, asked = self.home, decode.lease_request(request, self.home.limits.ranks, NOBODY)
        wait = min(from_duration(request.wait) or TIMES.max_wait, TIMES.max_wait)

        async def answers() -> AsyncGenerator[ReadAnswer, None]:
            yield await read_blocks(home, asked, wait, request.lease_id, request.next_step)

        return Pulled(
            answers(),
            lambda answer: pb.ReadBlocksResponse.FromString(
                encode.read_answer(home.epoch, answer, home.times, home.clock.now())
            ),
        )

    def watch(self, request: pb.WatchRequest) -> Pulled[pb.WatchResponse]:
        self.heard.append(request)
        home = self.home
        stream = watch(
            home, decode.process(request), request.session_secret, request.resume_epoch, request.resume_sequence
        )
        return Pulled(stream, lambda message: encode.watch_message(home.epoch, message, home.times, home.advertise))

    def pump(self, pipes: list[Pipe[Any]]) -> None:
        """Streams send what they have. Nothing is settled late: a turn ends with all of them told."""
        for pipe in list(pipes):
            server = pipe.server
            if server is None or pipe.ended:
                continue
            while (message := server.pull()) is not None:
                if pipe.listening:
                    pipe.messages.append(message)
            if server.ended:
                pipe.ended, pipe.error = True, server.error
