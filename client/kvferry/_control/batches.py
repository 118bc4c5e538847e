"""Bounds the size of messages before they are sent (PROTOCOL, Authority): splits notifications into batches, and
refuses messages that cannot be split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import Message

from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import MessageTooLarge
from kvferry.v1 import kv_transfer_pb2 as pb

SENT_BYTES = MAX_MESSAGE_BYTES - 256 * 1024
"""Bytes of the largest registration that a client sends. The margin leaves room for what a relay adds."""

SENT_NOTIFY_BYTES = MAX_NOTIFY_BYTES - 16 * 1024
"""Bytes of the notifications in one call. The margin leaves room for their sender and its secret."""

BATCH = 512
"""Most notifications in one call: a response of as many errors with all their values fits into one message."""

ITEM_BYTES = 8
"""Upper bound for the framing of a notification in its batch: a tag, and a length below 1 MiB."""

ADDED_BYTES = 512
"""Upper bound of the bytes that are added to a step after its size was checked: numbers, request_id and framing."""


def check_size(what: str, message: Message, most: int, added: int = 0) -> None:
    """Raise `MessageTooLarge` for a message that is larger than `most` bytes, or will be with `added` bytes more."""
    size = message.ByteSize() + added
    if size > most:
        raise MessageTooLarge(f"{what} takes {size} bytes; a message holds {most}", what=what, size=size, limit=most)


def check_notification(notification: pb.Notification) -> None:
    """Raise `MessageTooLarge` for a notification that does not fit into one message."""
    check_size(f"notification {notification.WhichOneof('kind')}", notification, SENT_NOTIFY_BYTES)


def batches(
    sender: pb.EngineRef, notifications: Iterable[pb.Notification], *, session_secret: bytes = b""
) -> Iterator[pb.NotifyRequest]:
    """Yield requests with the notifications in order, as few as the limits allow.

    `notifications` are consumed one at a time. `session_secret` is given if the sender is a source.

    Raises:
        MessageTooLarge: a notification does not fit into one message; the batches before were yielded.
    """
    batch: list[pb.Notification] = []
    empty = pb.NotifyRequest(sender=sender, session_secret=session_secret).ByteSize()
    size = empty
    for notification in notifications:
        own = notification.ByteSize() + ITEM_BYTES
        if batch and (len(batch) == BATCH or size + own > SENT_NOTIFY_BYTES):
            yield _request(sender, batch, session_secret)
            batch, size = [], empty
        check_notification(notification)
        batch.append(notification)
        size += own
    if batch:
        yield _request(sender, batch, session_secret)


def read_done(lease_id: bytes, reports: Sequence[pb.RankReport]) -> list[pb.Notification]:
    """Make notifications of the ends of shares, with at most `BATCH` reports each."""
    return [
        pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports[first : first + BATCH]))
        for first in range(0, len(reports), BATCH)
    ]


def _request(sender: pb.EngineRef, batch: list[pb.Notification], session_secret: bytes) -> pb.NotifyRequest:
    return pb.NotifyRequest(sender=sender, session_secret=session_secret, notifications=batch)
