"""A publication as messages: its step as readers get it, its hint, and what both tell beside the blocks.

In the client, only this module and `Publish` name the fields that a source tells its readers; other layers pass on a
`Told`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvferry.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a source tells the readers of a publication, beside its blocks and the marks of its prompt.

    Attributes:
        payload: opaque bytes, at most 64 KiB; empty until the blocks are complete.
    """

    payload: bytes = b""


def told_fields(told: Told) -> dict[str, Any]:
    """Return the fields of a `Told`, as arguments of a subclass, which has them as well."""
    return {field.name: getattr(told, field.name) for field in fields(Told)}


def told_with(told: Told, complete: pb.Complete) -> Told:
    """Return what a source has told so far, and what its home says of it with the last blocks."""
    return replace(told, payload=complete.payload)


def blocks_of(step: pb.Publish) -> pb.Blocks:
    """Return a step as readers get it: as its source sent it, without fields that this version does not know."""
    blocks = pb.Blocks(step=step.step, groups=step.groups, marks=step.marks)
    if step.HasField("unfinished"):
        blocks.unfinished.CopyFrom(step.unfinished)
    blocks.DiscardUnknownFields()
    return blocks


def hint_of(step: pb.Publish) -> pb.Hint:
    """Return the hint of a publication with one step."""
    return pb.Hint(groups=step.groups, marks=step.marks, payload=step.payload, request_id=step.request_id)


def granted_by(hint: pb.Hint) -> tuple[pb.Blocks, pb.Complete]:
    """Return what the home of a publication would answer, by its hint."""
    return pb.Blocks(groups=hint.groups, marks=hint.marks), pb.Complete(payload=hint.payload, steps=1)
