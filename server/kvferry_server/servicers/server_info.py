"""What a node server says of itself: its version, limits and capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from kvferry._clock import to_duration
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry._wire.reference import MAX_LENGTH
from kvferry._wire.version import OURS
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.domain.limits import MAX_HEADER_BYTES, MAX_PAYLOAD, MAX_RANK_BYTES, Limits
from kvferry_server.home.home import Home
from kvferry_server.servicers import encode, limits

CAPABILITIES = (
    "admin",
    "checksums",
    "decline_forwarding",
    "list_filters",
    "prompt_marks",
    "router_references",
    "unfinished_blocks",
)
"""What callers may ask for before they rely on it, because servers in other languages may not have it."""

OF_FIELDS = {
    "message_bytes": MAX_MESSAGE_BYTES,
    "notify_bytes": MAX_NOTIFY_BYTES,
    "engine_id": limits.MAX_TEXT,
    "request_id": limits.MAX_TEXT,
    "reference": MAX_LENGTH,
    "payload": MAX_PAYLOAD,
    "notifications": limits.MAX_NOTIFICATIONS,
    "identity": limits.MAX_IDENTITY,
    "groups": limits.MAX_GROUPS,
    "runs": limits.MAX_RUNS,
    "layers": limits.MAX_LAYERS,
    "unfinished": limits.MAX_UNFINISHED,
    "marks": limits.MAX_MARKS,
    "header_bytes": MAX_HEADER_BYTES,
    "rank_bytes": MAX_RANK_BYTES,
    "metadata": limits.MAX_METADATA,
    "page_size": limits.MAX_PAGE_SIZE,
}
"""The limits on the fields of requests that are the same for every node server of this version."""


def server_info(home: Home, of_calls: Mapping[str, int]) -> ipb.GetServerInfoResponse:
    """Describe a node server, within a turn of its home.

    Args:
        of_calls: its limits on calls and connections, by name.
    """
    of_home = {field.name: getattr(home.limits, field.name) for field in fields(Limits)}
    return ipb.GetServerInfoResponse(
        home_epoch=home.epoch,
        version=OURS.release,
        contract_revision=OURS.revision,
        oldest_revision=OURS.oldest,
        advertise=home.advertise,
        uptime=to_duration(home.uptime),
        draining=home.draining,
        times=encode.times(home.times),
        limits={**OF_FIELDS, **of_home, **of_calls},
        capabilities=CAPABILITIES,
    )
