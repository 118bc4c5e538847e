"""A hostile peer that may connect: it makes valid calls, in any order, with all values that it received.

It knows the contract and the node server's answers. Every value of every answer, error and token is kept in `Pockets`,
as received and with every usual encoding undone, and is sent again in any field of that kind. The peer also acts as an
engine, which watches, registers, publishes, reads and reports; under its own name and those of others.

python -m tests.fuzz.peer ADDRESS [ADDRESS ...] --seed 7 --pause 0.01
"""

from __future__ import annotations

import argparse
import itertools
import random
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvferry._wire.authority import SECRET_BYTES, incarnation_of
from kvferry._wire.reference import format_reference
from kvferry._wire.status import from_rpc_error
from kvferry.errors import PublicationTimeout
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.fuzz.messages import EXTREMES, introduced, is_map
from tests.fuzz.methods import METHODS, Method
from tests.fuzz.pockets import Pockets

ANSWERED = 20.0
"""Most seconds until the answer to a call that needs no event."""
WAITS = 0.05
"""Seconds that the peer reads a stream."""
AT_ONCE = 16
"""Streams that the peer holds open."""

OWN_ID = "~hostile"
"""Sorts after all other engines in every listing."""
SIZES = (16, 32)
"""Lengths of the contract's secrets."""

_SENT = {
    method.path: method
    for method in METHODS
    # Not Admin, which only operators may call.
    if method.path.startswith(("/kvferry.v1.KVTransfer/", "/kvferry.v1.Introspection/"))
}
_ANSWERS: dict[str, type[Message]] = {}
for _service in (pb.DESCRIPTOR.services_by_name["KVTransfer"], ipb.DESCRIPTOR.services_by_name["Introspection"]):
    for _method in _service.methods:
        _ANSWERS[f"/{_service.full_name}/{_method.name}"] = getattr(
            pb if hasattr(pb, _method.output_type.name) else ipb, _method.output_type.name
        )

WEIGHTS = {
    "ListTransfers": 5,
    "ListEngines": 2,
    "ListRequests": 2,
    "GetEngine": 1,
    "GetServerInfo": 1,
    "PlanRead": 1,
    "Notify": 14,
    "ReadBlocks": 10,
    "ReadChecksums": 2,
    "Watch": 4,
    "RegisterCache": 3,
    "Handshake": 2,
}
NOTIFICATIONS = ("read_done", "read_done", "cancel", "cancel", "renew", "decline", "publish", "abort", "resync")
"""Notifications that end something come more often."""
OF_A_READER = frozenset({"read_done", "cancel", "renew", "decline"})


class NotAnswered(AssertionError):
    """A call was not answered in `ANSWERED` seconds."""


class HostilePeer:
    """See the module.

    Args:
        address: of the node server.
        turns: the source of its choices.
        squats: whether it opens engines under others' names too. An engine that is away for an engine_ttl loses its
            engine_id to the next engine that asks, and one whose home has just started shares it.
    """

    def __init__(self, address: str, turns: random.Random, *, squats: bool = True) -> None:
        self._squats = squats
        self.known = Pockets()
        self.calls = 0
        self.slowest = 0.0
        self._listed = False
        self._turns = turns
        self._channel = grpc.insecure_channel(
            address,
            [
                ("grpc.max_receive_message_length", -1),
                *((f"grpc.{which}_reconnect_backoff_ms", 20) for which in ("initial", "min", "max")),
            ],
        )
        self._streams: list[Any] = []
        self._numbers = itertools.count(1)
        self._rush: threading.Thread | None = None
        self._rushing = threading.Event()
        self.secrets = [turns.randbytes(SECRET_BYTES) for _ in range(4)]
        """The peer's own session secrets."""
        self._incarnations = frozenset(map(incarnation_of, self.secrets))

    def act(self, calls: int) -> None:
        """Make some calls.

        Raises:
            NotAnswered: the node server left one unanswered.
        """
        for _ in range(calls):
            self._act()

    def learn_of(self, message: Message) -> None:
        """Give the peer a message without secrets."""
        self.known.learn(message)

    def rush(self) -> None:
        """Until `rest`: open Watches first when the home is back, in the names of all engines it knows."""
        self._rushing.set()
        self._rush = threading.Thread(target=self._first, name="hostile-rush", daemon=True)
        self._rush.start()

    def rest(self) -> None:
        """Stop `rush`."""
        self._rushing.clear()
        if self._rush is not None:
            self._rush.join()
            self._rush = None

    def close(self) -> None:
        """Close all streams and the channel."""
        self.rest()
        for stream in self._streams:
            stream.cancel()
        self._channel.close()

    # Acts.

    def _act(self) -> None:
        if self._turns.random() < 0.12:
            self._live_as_an_engine()
            return
        names = list(WEIGHTS)
        (name,) = self._turns.choices(names, [WEIGHTS[one] for one in names])
        if self._listed and self._turns.random() < 0.5:
            # The values just listed are of present engines.
            name = "Notify"
        self._listed = name.startswith("List")
        path = next(path for path in _SENT if path.endswith(f"/{name}"))
        self._call(_SENT[path], self._request(name, _SENT[path]))

    def _request(self, name: str, method: Method) -> Message:
        request: Any = self._made(method.request)
        if name.startswith("List"):
            # Page by page, so that the peer gets every token.
            request.page_size = self._turns.choice((0, 1, 1, 2, 3, 5))
            if self._turns.random() < 0.3:
                request.ClearField("page_token")
            if "engine_id" in request.DESCRIPTOR.fields_by_name and self._turns.random() < 0.7:
                request.ClearField("engine_id")
        elif isinstance(request, pb.NotifyRequest):
            kinds = self._turns.choices(NOTIFICATIONS, k=self._turns.choice((1, 1, 2, 4)))
            if self._turns.random() < 0.8:
                # One notification of a source without its secret fails the whole batch.
                kinds = [kind for kind in kinds if kind in OF_A_READER] or ["read_done"]
                request.ClearField("session_secret")
            del request.notifications[:]
            request.notifications.extend(self._notification(kind) for kind in kinds)
            if sender := self.known.messages["kvferry.v1.EngineRef"].draw(self._turns):
                request.sender.CopyFrom(sender)
        elif isinstance(request, (pb.HandshakeRequest, pb.RegisterCacheRequest, pb.WatchRequest)):
            # A relayed call would wait for another server.
            for field_name in ("relayed_by", "home"):
                if field_name in request.DESCRIPTOR.fields_by_name:
                    cleared: Message = request
                    cleared.ClearField(field_name)
            if (
                isinstance(request, pb.WatchRequest)
                and not self._squats
                and request.engine.incarnation in self._incarnations
            ):
                # Another's name may have been drawn beside it.
                request.engine.engine_id = OWN_ID
        elif isinstance(request, pb.ReadBlocksRequest):
            request.wait.FromMilliseconds(50)
        made: Message = request
        return made

    def _notification(self, kind: str) -> pb.Notification:
        notification = pb.Notification()
        field = notification.DESCRIPTOR.fields_by_name[kind]
        assert field.message_type is not None
        getattr(notification, kind).CopyFrom(self._made(field.message_type))
        if kind == "read_done":
            done = notification.read_done
            del done.reports[:]
            for rank in range(self._turns.choice((1, 1, 1, 2))):
                done.reports.add(rank=rank, outcome=self._turns.choice((1, 1, 1, 2, 3, 4)), bytes=1)
        return notification

    def _live_as_an_engine(self) -> None:
        """Open, register, publish and read correctly, under its own name or another's."""
        others = self._squats and self._turns.random() < 0.5
        engine_id = OWN_ID if not others else self.known.named["engine_id"].draw(self._turns) or OWN_ID
        secret = self._turns.choice(self.secrets)
        ref = pb.EngineRef(engine_id=engine_id, incarnation=incarnation_of(secret))
        watch = pb.WatchRequest(engine=ref, session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER)
        self._call(_SENT["/kvferry.v1.KVTransfer/Watch"], watch)
        self.known.learn(ref)
        geometry: Any = self.known.messages["kvferry.v1.EngineGeometry"].draw(
            # Further pages of an answer have ranks only.
            self._turns,
            lambda one: len(one.ranks) > 0 and len(one.groups) > 0,
        )
        if geometry is not None:
            request = pb.RegisterCacheRequest(engine=ref, session_secret=secret, num_ranks=1)
            request.identity.update(geometry.identity)
            request.groups.extend(geometry.groups)
            request.rank.CopyFrom(geometry.ranks[0])
            request.rank.rank = 0
            self._call(_SENT["/kvferry.v1.KVTransfer/RegisterCache"], request)
            number = next(self._numbers)
            publish = pb.Publish(publication=number, request_id=f"own-{number}", last=True, expected_reads=1)
            group = geometry.groups[0]
            publish.groups.add(group=group.name, end_token=group.block_tokens, run_starts=[1], run_counts=[1])
            resync = [pb.Notification(resync=pb.Resync(phase=phase)) for phase in (1, 2)]  # type: ignore[arg-type]
            request_of = pb.NotifyRequest(
                sender=ref, session_secret=secret, notifications=[*resync, pb.Notification(publish=publish)]
            )
            self._call(_SENT["/kvferry.v1.KVTransfer/Notify"], request_of)

    def _first(self) -> None:
        """Watch as every engine it knows, before that engine is back."""
        watch = self._stub(_SENT["/kvferry.v1.KVTransfer/Watch"])
        refs = self.known.messages["kvferry.v1.EngineRef"].all(of=lambda ref: ref.engine_id != OWN_ID)
        while self._rushing.is_set():
            held = []
            for ref in refs[:32]:
                for named in (ref, self._impostor(ref)):
                    secret = self.secrets[0]
                    request = pb.WatchRequest(engine=named, session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER)
                    held.append(watch(introduced(request), wait_for_ready=True))
            while self._rushing.is_set() and any(stream.is_active() for stream in held):
                time.sleep(0.01)
            for stream in held:
                if not stream.is_active():
                    stream.cancel()
            self._streams += [stream for stream in held if stream.is_active()]
            time.sleep(0.01)

    def _impostor(self, ref: Any) -> pb.EngineRef:
        """Return the peer's own incarnation under another's name."""
        return pb.EngineRef(engine_id=ref.engine_id, incarnation=incarnation_of(self.secrets[0]))

    # Calls.

    def _stub(self, method: Method) -> Callable[..., Any]:
        make: Any = self._channel.unary_stream if method.server_streams else self._channel.unary_unary
        stub: Callable[..., Any] = make(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=_ANSWERS[method.path].FromString,
        )
        return stub

    def _call(self, method: Method, request: Message) -> list[Message]:
        self.calls += 1
        if self._turns.random() < 0.98:
            introduced(request)
        began = time.monotonic()
        answers: list[Message] = []
        try:
            if method.server_streams:
                answers = self._listen(
                    self._stub(method)(request, timeout=None if "Watch" in method.path else WAITS * 5)
                )
            else:
                answers = [self._stub(method)(request, timeout=ANSWERED)]
        except grpc.RpcError as error:
            self.known.learn_error(error)
            code = error.code() if isinstance(error, grpc.Call) else None
            # A home answers with the same code when no publication arrives under a router's key.
            waited = isinstance(from_rpc_error(error, "the home"), PublicationTimeout)
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and not method.server_streams and not waited:
                raise NotAnswered(f"{method} was not answered in {ANSWERED} s: {request}") from None
        for answer in answers:
            self.known.learn(answer)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return answers

    def _listen(self, stream: Any) -> list[Message]:
        """Return the first messages of a stream, which is held open for a while."""
        heard: list[Message] = []
        ended = threading.Event()
        failure: list[grpc.RpcError] = []

        def follow() -> None:
            try:
                for message in stream:
                    heard.append(message)
                    if len(heard) >= 3:
                        ended.set()
            except grpc.RpcError as error:
                failure.append(error)
            ended.set()

        threading.Thread(target=follow, name="hostile-stream", daemon=True).start()
        ended.wait(WAITS)
        self._streams.append(stream)
        if len(self._streams) > AT_ONCE:
            self._streams.pop(self._turns.randrange(len(self._streams) - 1)).cancel()
        if failure and not heard:
            raise failure[0]
        return list(heard)

    # Messages.

    def _made(self, descriptor: Descriptor, depth: int = 0) -> Any:
        """Make a message of known values."""
        known = self.known.messages[descriptor.full_name].draw(self._turns)
        if known is not None and depth and self._turns.random() < 0.7:
            found = type(known)()
            found.CopyFrom(known)
            return found
        message = _class(descriptor)()
        chosen = {oneof.name: self._turns.choice(list(oneof.fields)).name for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            oneof = field.containing_oneof
            if oneof is not None and chosen[oneof.name] != field.name:
                continue
            if self._turns.random() < 0.85 and depth < 5 and not is_map(field):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        count = self._turns.choice((1, 1, 2, 3)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is not None:
                made = self._made(field.message_type, depth + 1)
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(made)
                continue
            value = self._value(field)
            with suppress(ValueError, TypeError):
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.name in ("reference", "references"):
            return self._reference()
        kind = _KINDS.get(field.type, int)
        chance = self._turns.random()
        if kind is bytes:
            return self._bytes(field.name)
        named = self.known.named[field.name].draw(self._turns)
        if named is not None and chance < 0.7:
            return named
        if kind is int and chance < 0.9:
            return self._turns.choice((0, 1, 1, 2, 3))
        other = self.known.kinds[kind].draw(self._turns)
        return other if other is not None and chance < 0.9 else self._turns.choice(EXTREMES[field.type])

    def _bytes(self, name: str) -> bytes:
        """Return bytes that may be a secret: any of that length."""
        pockets = (self.known.named[name], self.known.nameless, self.known.kinds[bytes], None)
        (pocket,) = self._turns.choices(pockets, (3, 4, 2, 2))
        found = pocket.draw(self._turns, lambda value: len(value) in SIZES) if pocket is not None else None
        return found if isinstance(found, bytes) else self._turns.choice(self.secrets)

    def _reference(self) -> str:
        known = self.known.named["reference"].draw(self._turns)
        if known and self._turns.random() < 0.4:
            return str(known)
        reference = self._made(pb.Reference.DESCRIPTOR)
        routed = self._turns.random() < 0.25
        if not routed:
            reference.ClearField("router_key")
        if ref := self.known.messages["kvferry.v1.EngineRef"].draw(self._turns):
            reference.engine_id, reference.incarnation = ref.engine_id, ref.incarnation
        if routed:
            # As a router makes a reference: before the publication.
            reference.ClearField("incarnation")
            reference.ClearField("publication")
        return format_reference(reference)


_KINDS: dict[int, type] = {
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_FLOAT: float,
}


def _class(descriptor: Descriptor) -> type[Message]:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between twenty calls")
    parser.add_argument("--no-squat", action="store_true")
    arguments = parser.parse_args()
    turns = random.Random(arguments.seed)
    peers = [HostilePeer(address, turns, squats=not arguments.no_squat) for address in arguments.addresses]
    while sys.stdin.isatty() or not select.select([sys.stdin], [], [], arguments.pause)[0]:
        for peer in peers:
            # A stopped server does not answer, as its operator knows.
            with suppress(NotAnswered):
                peer.act(20)
    print(sum(peer.calls for peer in peers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
