"""How many bytes the messages of a request have, so that a bare server can be called with as many."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import grpc
import numpy as np

from benchmarks.caches import Layout
from benchmarks.parties import TIMEOUT, Party, sent
from kvferry.v1 import kv_transfer_pb2 as pb

Sizes = tuple[int, int]
"""Bytes of a request and of its answer."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Of a publication of some blocks.

    Attributes:
        publish: Notify(publish).
        validate: Notify(validate), after a read without a lease.
        read: ReadBlocks, with the lease and all blocks in the answer.
        report: Notify(read done).
        renew: Notify(renew).
    """

    publish: Sizes
    validate: Sizes
    read: Sizes
    report: Sizes
    renew: Sizes


def sizes_of(channel: grpc.Channel, layout: Layout, blocks: int) -> CallSizes:
    """The sizes for a publication of so many scattered blocks, from real calls."""
    name = f"sizes-{secrets.token_hex(4)}"
    party = Party(channel, name, layout)
    party.open()
    try:
        ids = np.random.default_rng(0).permutation(layout.num_blocks)[:blocks].astype(np.int32)
        request = party.publish_request(ids)
        answer = party.stub.Notify(request, timeout=TIMEOUT)
        publish = (request.ByteSize(), answer.ByteSize())
        read = party.read_request(party.reference(), secrets.token_bytes(16))
        found = party.stub.ReadBlocks(read, timeout=TIMEOUT)
        renewal = party.as_reader(pb.Notification(renew=pb.Renew(lease_id=found.accepted.lease_id)))
        renewed = party.stub.Notify(renewal, timeout=TIMEOUT)
        report = party.done_request(found.accepted.lease_id)
        reported = party.stub.Notify(report, timeout=TIMEOUT)
        party.stub.Notify(party.publish_request(ids), timeout=TIMEOUT)
        validation = party.validate_request(party)
        validated = party.stub.Notify(validation, timeout=TIMEOUT)
        sent(party.stub, party.as_source(pb.Notification(abort=pb.Abort(publication=party.published))))
    finally:
        party.close()
    return CallSizes(
        publish=publish,
        validate=(validation.ByteSize(), validated.ByteSize()),
        read=(read.ByteSize(), found.ByteSize()),
        report=(report.ByteSize(), reported.ByteSize()),
        renew=(renewal.ByteSize(), renewed.ByteSize()),
    )
