"""Every message that can grow is bounded by its sender, in bytes and in number (PROTOCOL, Authority): batches are split
here, and what cannot be split is refused here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import Message

from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry.errors import MessageTooLarge
from kvferry.v1 import kv_transfer_pb2 as pb

SENT_BYTES = MAX_MESSAGE_BYTES - 256 * 1024
"""The largest message we send. The margin is for what is added on the way: a home sends the blocks of a step on in a
message of its own."""

BATCH = 512
"""Notifications per call; the contract allows 1024. An answer with as many errors, each with all its values, still fits
a message."""

ITEM_BYTES = 8
"""Framing of one notification in its batch: a tag, and a length below 4 MiB, with room."""


def check_size(what: str, message: Message) -> None:
    """Raise `MessageTooLarge` for a message that cannot be sent whole."""
    size = message.ByteSize()
    if size > SENT_BYTES:
        raise MessageTooLarge(
            f"{what} takes {size} bytes, at most {SENT_BYTES} fit a message", what=what, size=size, limit=SENT_BYTES
        )


def batches(
    sender: pb.EngineRef, notifications: Iterable[pb.Notification], *, session_secret: bytes = b""
) -> Iterator[pb.NotifyRequest]:
    """The notifications in order, in as few calls as the limits allow.

    Args:
        sender: the engine that speaks.
        notifications: may be made while they are taken.
        session_secret: where the engine speaks as a source.

    Raises:
        MessageTooLarge: one of them does not fit a message by itself; those before it were given.
    """
    batch: list[pb.Notification] = []
    empty = pb.NotifyRequest(sender=sender, session_secret=session_secret).ByteSize()
    size = empty
    for notification in notifications:
        own = notification.ByteSize() + ITEM_BYTES
        if batch and (len(batch) == BATCH or size + own > SENT_BYTES):
            yield _request(sender, batch, session_secret)
            batch, size = [], empty
        check_size(f"notification {notification.WhichOneof('kind')}", notification)
        batch.append(notification)
        size += own
    if batch:
        yield _request(sender, batch, session_secret)


def read_done(lease_id: bytes, reports: Sequence[pb.RankReport]) -> list[pb.Notification]:
    """How shares ended, as notifications of at most `BATCH` reports: the home takes reports as a set."""
    return [
        pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports[first : first + BATCH]))
        for first in range(0, len(reports), BATCH)
    ]


def _request(sender: pb.EngineRef, batch: list[pb.Notification], session_secret: bytes) -> pb.NotifyRequest:
    return pb.NotifyRequest(sender=sender, session_secret=session_secret, notifications=batch)
