"""The server under fire, who is on it, and what may not happen to it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.protobuf.message import Message

from kvferry._wire.authority import incarnation_of, publication_key
from kvferry._wire.geometry_codec import engine_to_proto, group_to_proto, rank_to_proto, region_to_proto
from kvferry._wire.handshake import put_together
from kvferry._wire.reference import format_reference
from kvferry._wire.status import from_rpc_error
from kvferry._wire.token import EngineToken
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub
from tests.e2e.servers import NodeServerProcess
from tests.fuzz.methods import Method
from tests.server.parties import FULL, agent_of, rank_geometry

TIMEOUT = 30.0
"""Seconds for any call: nothing here has anything to wait for."""
CPU_PER_MESSAGE = 2.0
CPU_PER_LARGE_MESSAGE = 10.0
"""Seconds of the server's CPU that a message may cost, an ordinary one and one of 4 MiB. Measured: a few milliseconds,
and 1 to 2 s for tens of thousands of planes."""
IDLE_WITHIN = 10.0
"""Seconds after the last message within which the server is idle again."""
GROWTH = 256 << 20
"""Bytes that the server may grow by during a test."""

# What a peer may be told. gRPC's own UNKNOWN is a handler that failed unseen, INTERNAL one that failed in our guard.
FAILURES = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})


class Party:
    """An engine without NIXL: it watches, registers one rank, publishes, and one reader has leased that."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        self.kv: Any = KVTransferStub(channel)
        self._named, self._lives = name, 0
        self._watch: Any = None

    def live(self) -> None:
        """Have a publication that is leased. A new engine, if too much was done to the one before in its own name."""
        try:
            if self._watch is None or not self._watch.is_active():
                self._open()
            self._offer()
        except (grpc.RpcError, AssertionError):
            self._open()
            self._offer()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def works(self) -> None:
        """An engine's daily life; raises unless all of it works."""
        self.live()
        answer = put_together(self.kv.Handshake(self.handshake(), timeout=TIMEOUT))
        if len(answer.geometry.ranks) != 1 or len(answer.agents) != 1:
            raise AssertionError(f"a handshake answered {answer}")
        self.publish()
        accepted = self.read()
        (ended,) = self.notify_reader(
            pb.Notification(
                read_done=pb.ReadDone(
                    lease_id=accepted, reports=[pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=7)]
                )
            )
        )
        if ended.read_ended.verdict != pb.VERDICT_VALID:
            raise AssertionError(f"a good read ended {ended}")

    # Requests as a well-behaved engine makes them; the fuzzer begins with these.

    def registration(self) -> pb.RegisterCacheRequest:
        (rank,) = self.geometry.ranks
        agent = agent_of(rank, f"{self.name}/{self.ref.incarnation.hex()}/0")
        return pb.RegisterCacheRequest(
            engine=self.ref,
            session_secret=self.secret,
            num_ranks=1,
            identity=self.geometry.identity,
            groups=[group_to_proto(group) for group in self.geometry.groups],
            rank=rank_to_proto(rank),
            agent=geometry_pb2.Agent(
                name=agent.name,
                metadata=agent.metadata,
                metadata_sha256=agent.metadata_sha256,
                regions=[region_to_proto(region) for region in agent.regions],
            ),
        )

    def handshake(self) -> pb.HandshakeRequest:
        rank: RankGeometry = rank_geometry()
        return pb.HandshakeRequest(
            engine_id=self.name,
            incarnation=self.ref.incarnation,
            reader=self.reader,
            identity=self.geometry.identity,
            groups=[group_to_proto(FULL)],
            rank=rank_to_proto(rank),
            reference=EngineToken(self.name, self.secret, "127.0.0.1:1").engine_reference,
        )

    def reference(self) -> str:
        return format_reference(
            pb.Reference(
                home="127.0.0.1:1",
                engine_id=self.name,
                incarnation=self.ref.incarnation,
                publication=self.publication,
                request_id=f"request-{self.publication}",
                key=publication_key(self.secret, self.publication),
            )
        )

    def read_request(self) -> pb.ReadBlocksRequest:
        return pb.ReadBlocksRequest(reference=self.reference(), reader=self.reader, read_id=b"r" * 16, parties=1)

    def poll_request(self) -> pb.PollBlocksRequest:
        """With the lease that it has, for the first step."""
        return pb.PollBlocksRequest(read=self.read_request(), lease_id=self.lease_id)

    def watch_request(self) -> pb.WatchRequest:
        return pb.WatchRequest(engine=self.ref, session_secret=self.secret, role=pb.WATCH_ROLE_SCHEDULER)

    def publish_notification(self, number: int) -> pb.Notification:
        groups = [pb.GroupBlocks(group=FULL.name, end_token=64, run_starts=[1], run_counts=[4])]
        publish = pb.Publish(
            publication=number, request_id=f"request-{number}", groups=groups, last=True, expected_reads=9
        )
        return pb.Notification(publish=publish)

    def notifications(self) -> pb.NotifyRequest:
        """One of each kind."""
        lease = self.lease_id
        report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=7)
        return pb.NotifyRequest(
            sender=self.ref,
            session_secret=self.secret,
            notifications=[
                self.publish_notification(self.publication + 1),
                pb.Notification(abort=pb.Abort(publication=self.publication + 1)),
                pb.Notification(released_ack=pb.ReleasedAck(publications=[1, 2])),
                pb.Notification(renew=pb.Renew(lease_id=lease)),
                pb.Notification(read_done=pb.ReadDone(lease_id=lease, reports=[report])),
                pb.Notification(cancel=pb.CancelRead(lease_id=lease)),
                pb.Notification(decline=pb.Decline(reference=self.reference())),
                pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN, high_water=3)),
            ],
        )

    def plan(self) -> ipb.PlanReadRequest:
        geometry = engine_to_proto(self.geometry)
        return ipb.PlanReadRequest(source_geometry=geometry, destination_geometry=geometry, ranks=[0])

    def publish(self) -> None:
        self.publication += 1
        self._notify(self.publish_notification(self.publication))

    def read(self) -> bytes:
        """Lease the publication; its lease."""
        stream = self.kv.ReadBlocks(self.read_request(), timeout=TIMEOUT)
        try:
            return bytes(next(stream).accepted.lease_id)
        finally:
            stream.cancel()

    def notify_reader(self, *notifications: pb.Notification) -> Sequence[pb.NotificationResult]:
        request = pb.NotifyRequest(sender=self.reader, notifications=notifications)
        return list(self.kv.Notify(request, timeout=TIMEOUT).results)

    def _notify(self, *notifications: pb.Notification) -> None:
        request = pb.NotifyRequest(sender=self.ref, session_secret=self.secret, notifications=notifications)
        for result in self.kv.Notify(request, timeout=TIMEOUT).results:
            if result.WhichOneof("kind") == "error":
                raise AssertionError(f"{self.name}: {result.error}")

    def _offer(self) -> None:
        self.publish()
        self.lease_id = self.read()

    def _open(self) -> None:
        self.close()
        self._lives += 1
        # Not the next one's name with a bit flipped.
        self.name = f"{self._named}-{hashlib.sha256(b'%d' % self._lives).hexdigest()[:16]}"
        self.secret = hashlib.sha256(self.name.encode()).digest()
        self.ref = pb.EngineRef(engine_id=self.name, incarnation=incarnation_of(self.secret))
        self.reader = pb.EngineRef(engine_id=f"{self.name}-reader", incarnation=b"r" * 16)
        self.geometry = EngineGeometry(self.name, (FULL,), (rank_geometry(),), {"model": "m"})
        self.publication = 0
        self._watch = self.kv.Watch(self.watch_request())
        for message in self._watch:
            if message.WhichOneof("event") == "synced":
                break
        self.kv.RegisterCache(self.registration(), timeout=TIMEOUT)
        self._notify(
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN)),
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_END)),
        )


class Target:
    """A node server in a process of its own, an engine that is spoken for by everybody, and one that is left alone."""

    def __init__(self, folder: Path) -> None:
        self._server = NodeServerProcess(folder, tcp=True, engine_ttl=2, retire=2, drain=0)
        self.log = folder / "log"

    def __enter__(self) -> Target:
        self._server.start()
        self.address = self._server.address
        self.channel = grpc.insecure_channel(self.address, (("grpc.max_receive_message_length", -1),))
        self.victim, self.bystander = Party(self.channel, "victim"), Party(self.channel, "bystander")
        self._process = psutil.Process(self._server.pid)
        self.bystander.live()
        self.victim.live()
        return self

    def __exit__(self, *_: object) -> None:
        for party in (self.victim, self.bystander):
            party.close()
        self.channel.close()
        self._server.stop()

    def cpu(self) -> float:
        """Seconds of CPU that the server has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Whatever happens within: afterwards the server is idle, has not grown, and serves the others."""
        before = self._process.memory_info().rss
        self.bystander.works()
        yield
        self.idle()
        grown = self._process.memory_info().rss - before
        assert grown < GROWTH, f"the server has grown by {grown >> 20} MiB"
        self.bystander.works()
        self.victim.live()

    def idle(self) -> None:
        """Wait until the server uses no CPU to speak of; raises `AssertionError` if it never stops."""
        deadline = time.monotonic() + IDLE_WITHIN
        used = self.cpu()
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, used = used, self.cpu()
            if used - before <= 0.02:
                return
        raise AssertionError(f"the server is still busy {IDLE_WITHIN} s after the last message")

    def send(self, method: Method, raw: bytes | Sequence[bytes], cpu: float = CPU_PER_MESSAGE) -> grpc.StatusCode:
        """Send bytes as a request (as several to a method that takes a stream), and check what comes of it."""
        requests = [raw] if isinstance(raw, bytes) else list(raw)
        before = self.cpu()
        try:
            self._call(method, requests)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = self._checked(method, requests, error)
        used = self.cpu() - before
        assert used < cpu, f"{method} took {used:.1f} s of CPU for {_shown(requests)}"
        return code

    def _call(self, method: Method, requests: Sequence[bytes]) -> None:
        # Without (de)serialisers a channel takes and gives bytes, which its types do not say.
        channel: Any = self.channel
        if method.client_streams:
            for _ in channel.stream_stream(method.path)(iter(requests), timeout=TIMEOUT):
                pass
            return
        (request,) = requests
        if not method.server_streams:
            channel.unary_unary(method.path)(request, timeout=TIMEOUT)
            return
        # A stream that was granted lasts as long as its lease or its process: its first message is the answer.
        stream = channel.unary_stream(method.path)(request, timeout=TIMEOUT)
        with suppress(StopIteration):
            next(stream)
        stream.cancel()

    def _checked(self, method: Method, requests: Sequence[bytes], error: grpc.RpcError) -> grpc.StatusCode:
        call: Any = error
        code: grpc.StatusCode = call.code()
        typed = from_rpc_error(error, self.address)
        said = f"{method} answered {code.name}, {call.details()!r}, to {_shown(requests)}"
        assert code not in FAILURES, said
        # Both of these are a server that does not answer, unless it says so by itself.
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            assert typed.reason not in ("", "UNREACHABLE"), said
        if method.path.startswith("/kvferry."):
            assert typed.reason, said
        return code


def _shown(requests: Sequence[bytes]) -> str:
    first = requests[0] if requests else b""
    return f"{len(requests)} request(s), the first of {len(first)} bytes: {first[:400].hex()}"


def encoded(message: Message) -> bytes:
    """Its bytes."""
    return message.SerializeToString()
