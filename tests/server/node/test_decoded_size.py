"""What a request takes once it is decoded, found on its bytes: what the contract allows passes, and what is made to
take much does not."""

from __future__ import annotations

import random
import resource
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.geometry.blocks import MAX_RUNS
from kvferry.v1 import admin_pb2 as apb
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_RANK_BYTES
from kvferry_server.node.decoded_size import LONG_LIST, WALK_STEPS, Decoded, shape_of
from kvferry_server.node.limits import MAX_FIELDS
from kvferry_server.servicers.limits import MAX_ACKNOWLEDGED, MAX_ASKED_PLANES, MAX_MARKS, MAX_NOTIFICATIONS

LEASE = bytes(range(16))


def walked(raw: bytes, kind: type[Message]) -> Decoded:
    found = Decoded(raw, shape_of(kind.DESCRIPTOR))
    for _ in found.walk():
        pass
    return found


def plane(layer: str) -> geometry_pb2.Plane:
    return geometry_pb2.Plane(
        layer=layer,
        component="key",
        group="full",
        format="nhd",
        dtype="bfloat16",
        memory_kind=geometry_pb2.MEMORY_KIND_DRAM,
        base=1 << 46,
        num_blocks=4096,
        block_stride=65536,
        page_tokens=16,
        block_states=16,
        token_stride=128,
        state_bytes=128,
        axis_size=8,
        unit_end=8,
    )


@cache
def largest() -> dict[str, Message]:
    """Requests as large as the contract allows, in small pieces."""
    short = plane("0")
    region = geometry_pb2.MemoryRegion(memory_kind=geometry_pb2.MEMORY_KIND_DRAM, base=1 << 46, length=1 << 20)
    planes = [short] * ((MAX_RANK_BYTES - 64) // (short.ByteSize() + 2))
    regions = [region] * ((MAX_RANK_BYTES - 64) // (region.ByteSize() + 2))
    run = pb.GroupBlocks(
        group="full", end_token=16 * MAX_RUNS, run_starts=range(0, 2 * MAX_RUNS, 2), run_counts=[1] * MAX_RUNS
    )
    sums = pb.Checksums(plane="0/key", unit_end=1, place_starts=[1], place_counts=[1], sums=[7])
    one_block = pb.GroupBlocks(group="f", end_token=16, run_starts=[1], run_counts=[1])
    marks = [pb.PromptMark(end=end, digest=b"d" * 16) for end in range(1, MAX_MARKS + 1)]
    notifications = {
        "renewals": pb.Notification(renew=pb.Renew(lease_id=LEASE)),
        "aborts": pb.Notification(abort=pb.Abort(publication=1)),
        "publications": pb.Notification(publish=pb.Publish(publication=1, request_id="r", groups=[one_block] * 32)),
        "marked publications": pb.Notification(publish=pb.Publish(publication=1, request_id="r", marks=marks)),
        "reports": pb.Notification(
            read_done=pb.ReadDone(
                lease_id=LEASE, reports=[pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE) for rank in range(64)]
            )
        ),
        "sums": pb.Notification(checksums=pb.PublishChecksums(publication=1, checksums=[sums] * 16)),
        "declines": pb.Notification(decline=pb.Decline(reference="kvf1.x")),
    }
    batches = {
        name: pb.NotifyRequest(notifications=[one] * min(MAX_NOTIFICATIONS, MAX_NOTIFY_BYTES // (one.ByteSize() + 4)))
        for name, one in notifications.items()
    }
    acknowledged = pb.ReleasedAck(publications=range(1, MAX_ACKNOWLEDGED + 1))
    rank = geometry_pb2.RankGeometry(planes=planes)
    return {
        **batches,
        "a step": pb.NotifyRequest(notifications=[pb.Notification(publish=pb.Publish(publication=1, groups=[run]))]),
        "acknowledgements": pb.NotifyRequest(notifications=[pb.Notification(released_ack=acknowledged)]),
        "planes": pb.RegisterCacheRequest(rank=rank),
        "regions": pb.RegisterCacheRequest(agent=geometry_pb2.Agent(regions=regions)),
        "planes of a reader": pb.HandshakeRequest(rank=rank),
        "ranks to plan": ipb.PlanReadRequest(
            source_geometry=geometry_pb2.EngineGeometry(
                ranks=[geometry_pb2.RankGeometry(rank=number, planes=[short]) for number in range(4096)]
            ),
            ranks=range(4096),
        ),
        "sums asked": pb.ReadChecksumsRequest(
            queries=[pb.ChecksumQuery(planes=[f"{number}/key" for number in range(MAX_ASKED_PLANES)], place_starts=[0])]
        ),
        "sums of scattered places asked": pb.ReadChecksumsRequest(
            queries=[
                pb.ChecksumQuery(place_starts=range(0, 1 << 20, 2), place_counts=[1] * (1 << 19)),
                pb.ChecksumQuery(planes=[f"{number:0317d}/key" for number in range(MAX_ASKED_PLANES)]),
            ]
        ),
    }


@pytest.mark.parametrize("service", [pb, ipb, apb], ids=lambda module: module.DESCRIPTOR.name)
def test_requests_of_the_contract_all_have_a_shape(service: Any) -> None:
    """A message that contains itself has no shape, and all calls with it would fail."""
    for one in service.DESCRIPTOR.services_by_name.values():
        for method in one.methods:
            assert shape_of(method.input_type).size > 0


@pytest.mark.parametrize(
    ("holder", "field"),
    [
        (geometry_pb2.RankGeometry, "planes"),
        (geometry_pb2.EngineGeometry, "ranks"),
        (geometry_pb2.Agent, "regions"),
        (pb.NotifyRequest, "notifications"),
        (pb.Publish, "groups"),
        (pb.ReadDone, "reports"),
        (pb.PublishChecksums, "checksums"),
        (pb.ReadChecksumsRequest, "queries"),
    ],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_messages_without_content_take_no_more_memory_than_counted(holder: type[Message], field: str) -> None:
    described, many = holder.DESCRIPTOR.fields_by_name[field], 200_000
    raw = bytes((described.number << 3 | 2, 0)) * many
    before = resident()
    decoded = holder.FromString(raw)
    # The rest of the process takes a little memory, too. The count may exceed the memory by half.
    assert resident() - before <= 1.2 * many * shape_of(described.message_type).size
    assert len(getattr(decoded, field)) == many


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("numbers", [0, 100, LONG_LIST])
def test_numbers_of_a_list_are_counted_whatever_their_length(numbers: int) -> None:
    drawn = random.Random(numbers)
    starts = [drawn.choice((0, 127, 128, 1 << 40)) for _ in range(numbers)]
    query = pb.ChecksumQuery(place_starts=starts)
    raw = pb.ReadChecksumsRequest(queries=[query]).SerializeToString()
    without = pb.ReadChecksumsRequest(queries=[pb.ChecksumQuery()]).SerializeToString()
    more = walked(raw, pb.ReadChecksumsRequest).size - walked(without, pb.ReadChecksumsRequest).size
    assert more == len(raw) - len(without) + 8 * numbers


@pytest.mark.parametrize("what", largest())
def test_largest_requests_of_the_contract_are_within_the_limits(what: str) -> None:
    request = largest()[what]
    raw = request.SerializeToString()
    assert len(raw) <= (MAX_NOTIFY_BYTES if isinstance(request, pb.NotifyRequest) else MAX_MESSAGE_BYTES)
    assert walked(raw, type(request)).fits


def test_a_request_of_very_many_fields_is_refused_after_a_walk_with_pauses() -> None:
    """A field that may come once takes little memory however often it comes, and the walk a quarter of a second."""
    number = pb.ReadBlocksRequest.DESCRIPTOR.fields_by_name["reference"].number
    found = Decoded(bytes((number << 3 | 2, 0)) * 2 * MAX_FIELDS, shape_of(pb.ReadBlocksRequest.DESCRIPTOR))
    pauses = sum(1 for _ in found.walk())
    assert (found.fits, found.size <= found.most, pauses) == (False, True, MAX_FIELDS // WALK_STEPS)


def test_damaged_request_takes_no_more_memory_than_found() -> None:
    """Cut and changed messages: if they decode, they have no more parts than the walk has counted."""
    requests, drawn = largest(), random.Random(7)
    for name in ("publications", "reports", "sums", "renewals"):
        whole = pb.NotifyRequest(notifications=requests[name].notifications[:4])  # type: ignore[attr-defined]
        raw = whole.SerializeToString()
        for _ in range(500):
            damaged = bytearray(raw[: drawn.randrange(len(raw) + 1)])
            for _ in range(drawn.randrange(3)):
                if damaged:
                    damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
            try:
                decoded = pb.NotifyRequest.FromString(bytes(damaged))
            except DecodeError:
                continue
            assert walked(bytes(damaged), pb.NotifyRequest).size >= 24 * parts(decoded)


def parts(message: Message) -> int:
    """How many messages a message has in lists."""
    found = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        single = isinstance(value, Message)
        inner = [value] if single else value
        found += (0 if single else len(inner)) + sum(parts(one) for one in inner)
    return found


def test_group_of_the_old_wire_format_does_not_hide_later_fields() -> None:
    hidden = b"\xfb\x01\xfc\x01" + b"\x1a\x00" * 500_000
    assert pb.NotifyRequest.FromString(hidden).notifications
    assert not walked(hidden, pb.NotifyRequest).fits
