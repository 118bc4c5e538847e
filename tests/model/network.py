"""The network between the participants: calls, which are lost, repeated, delayed and overtake each other, and streams,
which are delayed and cut.

As in gRPC, a stream's messages stay in order, and a request to a home that died does not reach the next home, unless
its caller still waits (gRPC may then send it again). A request arrives at most `LIFE` seconds after its call was given
up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvferry._control.backoff import CALL_TIMEOUT
from kvferry.errors import KvferryError, Unreachable
from tests.model.clocks import RealTime
from tests.model.host import Host, Pulled

T = TypeVar("T")

LIFE = 4.0
"""Seconds; below the margin of a local release, which has to outlast a publish that was given up."""


@dataclass(eq=False)
class Call:
    """One attempt. `end` is called once, with the home's answer or an error."""

    owner: object
    serve: Callable[[Host], object]
    end: Callable[[object], None]
    sent_at: float
    closed_at: float | None = None

    @property
    def open(self) -> bool:
        return self.closed_at is None


@dataclass(eq=False)
class Packet:
    """A request or its answer."""

    call: Call
    first: bool = True
    answer: Any = None

    @property
    def straggles(self) -> bool:
        """Whether this is another copy of a request that arrived before; it may come much later."""
        return self.answer is None and not self.first


@dataclass(eq=False)
class Pipe(Generic[T]):
    """A stream: the home's messages, and their receiver."""

    on_message: Callable[[T], None]
    on_end: Callable[[KvferryError | None], None]
    ready: Callable[[], bool] = lambda: True
    server: Pulled[T] | None = None
    messages: deque[T] = field(default_factory=deque)
    listening: bool = True
    ended: bool = False
    error: KvferryError | None = None


class Network:
    """All messages under way. The owner decides what happens to each, and when."""

    def __init__(self, time: RealTime) -> None:
        self.packets: list[Packet] = []
        self.calls: list[Call] = []
        self.pipes: list[Pipe[object]] = []
        self._time = time

    # Calls of participants.

    def call(self, owner: object, serve: Callable[[Host], object], end: Callable[[object], None]) -> Call:
        call = Call(owner, serve, end, self._time.now)
        self.calls.append(call)
        self.packets.append(Packet(call))
        return call

    def open(self, owner: object, serve: Callable[[Host], Pulled[T]], pipe: Pipe[T]) -> None:
        """Open a stream."""

        def attach(host: Host) -> object:
            server = serve(host)
            if pipe.server is None and not pipe.ended and pipe.listening:
                pipe.server = server
            else:
                # A repeated or late request: the home serves a stream without a receiver.
                self.pipes.append(Pipe(lambda _: None, lambda _: None, server=server, listening=False))  # type: ignore[arg-type]
            return None

        def failed(answer: Any) -> None:
            if isinstance(answer, KvferryError):
                self.cut(pipe, answer)

        self.pipes.append(pipe)  # type: ignore[arg-type]
        self.call(owner, attach, failed)

    def cut(self, pipe: Pipe[T], error: KvferryError | None = None) -> None:
        """The client loses the stream, or leaves it; the home may not have noticed yet."""
        if pipe.listening:
            pipe.listening = False
            pipe.messages.clear()
            pipe.on_end(error or Unreachable("the stream was cut"))

    def abandon(self, owner: object) -> None:
        """The caller is gone."""
        for call in [call for call in self.calls if call.owner is owner]:
            call.closed_at = self._time.now
            self.calls.remove(call)

    # Events of the network.

    def arrive(self, packet: Packet, host: Host | None, *, again: bool = False) -> None:
        """A packet arrives; a request may arrive again later."""
        call = packet.call
        if packet.answer is not None:
            self.packets.remove(packet)
            self._end(call, packet.answer)
            return
        if not again:
            self.packets.remove(packet)
        if host is None or not self._heard(call):
            return
        packet.first = False
        try:
            answer = call.serve(host)
        except KvferryError as error:
            answer = error
        host.pump(self.pipes)
        if call.open:
            self.packets.append(Packet(call, answer=(answer,)))

    def lose(self, packet: Packet) -> None:
        self.packets.remove(packet)

    def give_up(self, call: Call) -> None:
        """The caller stops waiting."""
        self._end(call, (Unreachable("no answer in time"),))

    def expire(self) -> None:
        """Give up the calls whose timeout has passed."""
        for call in [call for call in self.calls if self._time.now > call.sent_at + CALL_TIMEOUT]:
            if call.open:
                self.give_up(call)
        self.packets = [one for one in self.packets if one.answer is not None or self._heard(one.call)]

    def receive(self, pipe: Pipe[T]) -> bool:
        """The client receives the next message of a stream. Returns whether there was any."""
        if not pipe.listening or not pipe.ready():
            return False
        if pipe.messages:
            pipe.on_message(pipe.messages.popleft())
            return True
        if pipe.ended:
            pipe.listening = False
            pipe.on_end(pipe.error)
            return True
        return False

    def notice(self, pipe: Pipe[T]) -> None:
        """The home notices that the client has left a stream."""
        if pipe.server is not None and not pipe.listening:
            pipe.server.close()
            pipe.ended = True
            self._sweep()

    def home_gone(self) -> None:
        """The home has died: streams end after their sent messages, and requests without a waiting caller are lost."""
        for pipe in self.pipes:
            if pipe.server is not None:
                pipe.server.close()
                pipe.ended, pipe.error = True, pipe.error or Unreachable("the home is gone")
        self.packets = [one for one in self.packets if one.answer is not None or (one.first and one.call.open)]
        self._sweep()

    def close(self) -> None:
        """Close all streams."""
        for pipe in self.pipes:
            if pipe.server is not None:
                pipe.server.close()

    def _heard(self, call: Call) -> bool:
        return call.closed_at is None or self._time.now <= call.closed_at + LIFE

    def _end(self, call: Call, answer: Any) -> None:
        if call.open:
            call.closed_at = self._time.now
            self.calls.remove(call)
            (value,) = answer
            call.end(value)

    def _sweep(self) -> None:
        self.pipes = [pipe for pipe in self.pipes if pipe.listening or not pipe.ended]
