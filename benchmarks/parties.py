"""Engines that speak to a node server in messages alone, without memory and without NIXL: what a call costs is the
same, and thousands of them fit one process."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import grpc

from benchmarks.caches import Ids, Layout
from kvferry import Blocks, EngineToken
from kvferry._wire.authority import PublicationKeys, incarnation_of
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto, region_to_proto
from kvferry._wire.reference import format_reference, hint_digest
from kvferry._wire.version import OURS_ENCODED
from kvferry.geometry import MemoryKind, MemoryRegion, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.stubs import KVTransferStub

TIMEOUT = 60.0
HOME = "127.0.0.1:1"
"""What references name as the home; nobody here dials it."""

METADATA_BYTES = 512
"""About what the metadata of a NIXL agent with one region take."""


class Party:
    """One engine.

    Args:
        channel: to its home.
        name: its engine_id.
        layout: of its ranks' caches.
        num_ranks: how many it has; the heads of the layout are divided over them.
    """

    def __init__(self, channel: grpc.Channel, name: str, layout: Layout, num_ranks: int = 1) -> None:
        self.stub: Any = KVTransferStub(channel)
        self.layout, self.num_ranks = layout, num_ranks
        self.secret = hashlib.sha256(name.encode()).digest()
        self.ref = pb.EngineRef(engine_id=name, incarnation=incarnation_of(self.secret))
        self.published = 0
        self._hint_digest = b""
        """Of the last publication."""
        self._watch: Any = None

    def open(self) -> None:
        """Open the engine with its Watch, register all ranks, and say that nothing is published."""
        self._watch = self.stub.Watch(
            pb.WatchRequest(engine=self.ref, session_secret=self.secret, role=pb.WATCH_ROLE_SCHEDULER)
        )
        for message in self._watch:
            if message.WhichOneof("event") == "synced":
                break
        self.notify(
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN)),
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_END)),
        )
        for rank in range(self.num_ranks):
            self.stub.RegisterCache(self.registration(rank), timeout=TIMEOUT)

    def close(self) -> None:
        """End the Watch."""
        if self._watch is not None:
            self._watch.cancel()

    @property
    def engine_reference(self) -> str:
        """The engine's own reference."""
        return EngineToken(self.ref.engine_id, self.secret, HOME).engine_reference

    def geometry(self, rank: int) -> RankGeometry:
        """The geometry of a rank, at an address of its own."""
        heads, base = self.layout.heads // self.num_ranks, (rank + 1) << 36
        planes = self.layout.planes(base, heads, first=rank * heads)
        return RankGeometry(rank, planes)

    def registration(self, rank: int) -> pb.RegisterCacheRequest:
        """The registration of a rank."""
        made = self.geometry(rank)
        heads = self.layout.heads // self.num_ranks
        region = MemoryRegion(
            MemoryKind.DRAM, 0, (rank + 1) << 36, self.layout.num_blocks * self.layout.block_bytes(heads)
        )
        metadata = hashlib.sha256(b"%d" % rank).digest() * (METADATA_BYTES // 32)
        return pb.RegisterCacheRequest(
            engine=self.ref,
            session_secret=self.secret,
            num_ranks=self.num_ranks,
            groups=[group_to_proto(self.layout.group())],
            rank=rank_to_proto(made),
            agent=geometry_pb2.Agent(
                name=f"{self.ref.engine_id}/{self.ref.incarnation.hex()}/{rank}",
                metadata=metadata,
                metadata_sha256=hashlib.sha256(metadata).digest(),
                regions=[region_to_proto(region)],
            ),
        )

    def handshake(self, source: Party, rank: int = 0) -> pb.HandshakeRequest:
        """A rank's handshake with another engine, for its agents."""
        return pb.HandshakeRequest(
            version=OURS_ENCODED,
            engine_id=source.ref.engine_id,
            incarnation=source.ref.incarnation,
            reader=self.ref,
            groups=[group_to_proto(self.layout.group())],
            rank=rank_to_proto(self.geometry(rank)),
            reference=source.engine_reference,
        )

    def publish_request(self, ids: Ids) -> pb.NotifyRequest:
        """The next publication, of these blocks."""
        self.published += 1
        blocks = Blocks(ids)
        starts, counts = runs_of(blocks.ids)
        group = pb.GroupBlocks(
            group="full", end_token=len(ids) * self.layout.block_tokens, run_starts=starts, run_counts=counts
        )
        request_id = f"request-{self.published}"
        hint = pb.Hint(groups=[group], request_id=request_id)
        self._hint_digest = hint_digest(hint.SerializeToString(deterministic=True))
        publish = pb.Publish(
            publication=self.published,
            request_id=request_id,
            groups=[group],
            last=True,
            hint_digest=self._hint_digest,
        )
        return self.as_source(pb.Notification(publish=publish))

    def reference(self, publication: int = 0) -> str:
        """The reference of a publication; 0: the last."""
        number = publication or self.published
        return format_reference(
            pb.Reference(
                home=HOME,
                engine_id=self.ref.engine_id,
                incarnation=self.ref.incarnation,
                publication=number,
                request_id=f"request-{number}",
                key=PublicationKeys(self.secret).key(number),
            )
        )

    def read_request(self, reference: str, read_id: bytes) -> pb.ReadBlocksRequest:
        """A read of a publication by this engine; the read_id has 16 bytes."""
        return pb.ReadBlocksRequest(
            version=OURS_ENCODED, reference=reference, reader=self.ref, read_id=read_id, parties=1
        )

    def validate_request(self, source: Party) -> pb.NotifyRequest:
        """What the one rank of a read without a lease asks after it has read all of a source's last publication."""
        validate = pb.Validate(
            reference=source.reference(),
            read_id=secrets.token_bytes(16),
            hint_digest=source._hint_digest,
            parties=1,
            reports=[pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=1)],
        )
        return self.as_reader(pb.Notification(validate=validate))

    def as_source(self, *notifications: pb.Notification) -> pb.NotifyRequest:
        """A batch of a source."""
        return pb.NotifyRequest(
            version=OURS_ENCODED, sender=self.ref, session_secret=self.secret, notifications=notifications
        )

    def as_reader(self, *notifications: pb.Notification) -> pb.NotifyRequest:
        """A batch of a reader."""
        return pb.NotifyRequest(version=OURS_ENCODED, sender=self.ref, notifications=notifications)

    def done_request(self, lease_id: bytes) -> pb.NotifyRequest:
        """The report that the one rank of a read has read all."""
        report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=1)
        return self.as_reader(pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=[report])))

    def notify(self, *notifications: pb.Notification) -> Sequence[pb.NotificationResult]:
        """Send a batch in this engine's name; see `sent`."""
        return sent(self.stub, self.as_source(*notifications))


def sent(stub: Any, request: pb.NotifyRequest) -> Sequence[pb.NotificationResult]:
    """Send a batch; its results.

    Raises:
        AssertionError: one of them is an error.
    """
    results: Sequence[pb.NotificationResult] = stub.Notify(request, timeout=TIMEOUT).results
    for result in results:
        if result.WhichOneof("kind") == "error":
            raise AssertionError(f"a notification was refused: {result.error}")
    return results


def runs_of(ids: Ids) -> tuple[list[int], list[int]]:
    """First ids and lengths of the runs of consecutive ids."""
    starts: list[int] = []
    counts: list[int] = []
    for block in ids.tolist():
        if starts and block == starts[-1] + counts[-1]:
            counts[-1] += 1
        else:
            starts.append(block)
            counts.append(1)
    return starts, counts
