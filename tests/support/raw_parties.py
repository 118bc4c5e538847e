"""An engine that speaks to a node server over gRPC's own stubs, without NIXL."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import grpc

from kvferry._wire.authority import PublicationKeys, incarnation_of
from kvferry._wire.geometry_codec import engine_to_proto, group_to_proto, put_together, rank_to_proto, region_to_proto
from kvferry._wire.reference import format_reference
from kvferry._wire.token import EngineToken
from kvferry.geometry import EngineGeometry, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.parties import FULL, agent_of, rank_geometry
from tests.support.stubs import KVTransferStub

TIMEOUT = 30.0
"""Seconds for any call: nothing here has anything to wait for."""


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
                key=PublicationKeys(self.secret).key(self.publication),
            )
        )

    def read_request(self, lease_id: bytes = b"") -> pb.ReadBlocksRequest:
        reference, read_id = self.reference(), b"r" * 16
        return pb.ReadBlocksRequest(
            reference=reference, reader=self.reader, read_id=read_id, parties=1, lease_id=lease_id
        )

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
        return bytes(self.kv.ReadBlocks(self.read_request(), timeout=TIMEOUT).accepted.lease_id)

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
