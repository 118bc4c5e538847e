"""A gRPC server that answers just what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvferry import EngineSpec, Group
from kvferry._control.connection import Control
from kvferry._control.home_session import HomeSession
from kvferry._loop import Loop
from kvferry._wire.status import to_status
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferServicer, add_KVTransferServicer_to_server

EPOCH = b"e" * 16
SPEC = EngineSpec("engine", (Group("full", block_tokens=16, num_blocks=8),))


class Scripted(KVTransferServicer):
    """What it answers stands in its attributes; a method may raise a `KvferryError`.

    Attributes:
        loop: the loop of the client that is connected to it.
    """

    loop: Loop

    def __init__(self) -> None:
        self.notified: list[pb.NotifyRequest] = []
        self.watched: list[pb.WatchRequest] = []
        self.asked: list[pb.ReadBlocksRequest] = []
        self.notify: Callable[[pb.NotifyRequest], list[pb.NotificationResult]] = _acknowledged
        self.watch: Callable[[int], Iterator[pb.WatchResponse]] = lambda _: iter(())
        self.read_blocks: Callable[[pb.ReadBlocksRequest], pb.ReadBlocksResponse] = lambda _: polled()
        self.news = threading.Condition()

    def Notify(self, request: pb.NotifyRequest, context: Any) -> pb.NotifyResponse:
        with self.news:
            self.notified.append(request)
            self.news.notify_all()
        try:
            results = self.notify(request)
        except KvferryError as error:
            _abort(context, error)
            results = []
        return pb.NotifyResponse(home_epoch=EPOCH, results=results, version=OURS_ENCODED)

    def RegisterCache(self, request: pb.RegisterCacheRequest, context: Any) -> pb.RegisterCacheResponse:
        return pb.RegisterCacheResponse(home_epoch=EPOCH, version=OURS_ENCODED)

    def Handshake(self, request: pb.HandshakeRequest, context: Any) -> Iterator[pb.HandshakeResponse]:
        yield pb.HandshakeResponse(home_epoch=EPOCH, version=OURS_ENCODED)

    def ReadChecksums(self, request: pb.ReadChecksumsRequest, context: Any) -> pb.ReadChecksumsResponse:
        return pb.ReadChecksumsResponse(home_epoch=EPOCH)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        with self.news:
            self.watched.append(request)
            self.news.notify_all()
        try:
            for count, message in enumerate(self.watch(len(self.watched))):
                if not count:
                    message.version.CopyFrom(OURS_ENCODED)
                yield message
        except KvferryError as error:
            _abort(context, error)
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait(60)

    def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> pb.ReadBlocksResponse:
        with self.news:
            self.asked.append(request)
            self.news.notify_all()
        try:
            return self.read_blocks(request)
        except KvferryError as error:
            _abort(context, error)
            return polled()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a call brings about."""
        with self.news:
            assert self.news.wait_for(condition, 30), "it did not come about"


def opened_session(control: Control, timeout: float = 30.0) -> HomeSession:
    """A session at the home, on the loop of the connection."""
    session = HomeSession(control._loop, control, SPEC)
    control._loop.run(session.open(timeout))
    return session


def opened(**changes: Any) -> pb.WatchResponse:
    """The first event of a Watch, with times that end nothing during a test."""
    event = pb.WatchOpened(advertise="home:1", **changes)
    event.times.final.FromSeconds(600)
    event.times.max_ttl.FromSeconds(60)
    return pb.WatchResponse(home_epoch=EPOCH, opened=event)


def synced(*, need_resync: bool = False) -> pb.WatchResponse:
    """The end of the full state."""
    return pb.WatchResponse(home_epoch=EPOCH, synced=pb.WatchSynced(need_resync=need_resync))


def released(publication: int, **changes: Any) -> pb.WatchResponse:
    """A release."""
    event = pb.Released(publication=publication, outcome=pb.RELEASE_OUTCOME_READ)
    return pb.WatchResponse(home_epoch=EPOCH, released=event, **changes)


def polled(**told: Any) -> pb.ReadBlocksResponse:
    """An answer to a reader; nothing told: nothing new."""
    return pb.ReadBlocksResponse(home_epoch=EPOCH, version=OURS_ENCODED, **told)


@contextmanager
def scripted(folder: Path, answers: Scripted | None = None) -> Iterator[tuple[Scripted, Control]]:
    """The server, and a client's connection to it."""
    answers = answers or Scripted()
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_send_message_length", -1)])
    add_KVTransferServicer_to_server(answers, server)
    address = f"unix:{folder / 'scripted'}"
    server.add_insecure_port(address)
    server.start()
    answers.loop = Loop("kvferry-test-loop")
    control = Control(address, None, answers.loop)
    try:
        yield answers, control
    finally:
        answers.loop.call(control.close)
        answers.loop.close(30)
        server.stop(0)


def _acknowledged(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
    return [pb.NotificationResult(done=pb.Acknowledged()) for _ in request.notifications]


def _abort(context: Any, error: KvferryError) -> Any:
    code, message, metadata = to_status(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, message)
