"""Collects the steps of a publication that a home grants, and joins those that were not taken to one part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry._prompt import MARK_BYTES, MAX_MARKS
from kvferry._wire.geometry_codec import blocks_from_proto, runs_from_proto
from kvferry._wire.publication import Told, told_with
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, MAX_LAYERS, MAX_UNFINISHED, BlockRuns, Blocks, Unfinished
from kvferry.v1 import kv_transfer_pb2 as pb

GRANT_BYTES = 128 << 20
"""Most bytes of a publication's encoded blocks: `MAX_BLOCKS` single ids. A home must not fill the reader's memory."""

STEP_BYTES = 256
"""Bytes to count for each step in addition to its blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class GrantedPart:
    """Blocks that a reader was granted, since those before; they continue each group where it ended.

    Attributes:
        told: what the source has told so far, with these blocks or those before.
        complete: no blocks follow.
        unfinished: the blocks after these of which only some layers are complete; None: there are none.
    """

    blocks: Mapping[str, Blocks]
    told: Told = field(default=Told())
    complete: bool = True
    unfinished: Unfinished | None = None


class GrantedSteps:
    """The steps that one reader was granted, and which of them it has taken. A home that was restarted sends all steps
    again; they must equal those from before. `marks` are those of the prompt in these steps, by their ends."""

    def __init__(self) -> None:
        self.marks: dict[int, bytes] = {}
        self._told, self._complete = Told(), False
        self._fresh: list[pb.Blocks] = []
        """Steps that were not taken."""
        self._received = 0
        self._digests: list[bytes] = []
        """The digest of each step. Steps that were taken are not kept."""
        self._ends: dict[str, int] = {}
        """Where the complete blocks of groups end, in the steps that were taken."""
        self._size = self._blocks = 0
        self._begun: dict[str, BlockRuns] = {}
        self._layers: set[str] = set()
        """The blocks behind these ends of which only some layers are complete, and those layers."""

    def __len__(self) -> int:
        """The number of steps that were received, since the home's last restart."""
        return self._received

    @property
    def gained(self) -> bool:
        """Whether a step that was not taken has blocks, or names layers."""
        return any(step.groups or step.HasField("unfinished") for step in self._fresh)

    def add(self, steps: Iterable[pb.Blocks], complete: pb.Complete | None = None) -> None:
        """Add the next steps, and what their home says with the last; raises `InvalidField` if a step is missing, out
        of order, or differs from the one received before, or the steps are too large."""
        for step in steps:
            if step.step != self._received:
                raise InvalidField("number of a publication's step", step.step, f"{self._received}, the next one")
            # Also in its groups: a home that is replaced by one of another version begins to send them, or stops.
            step.DiscardUnknownFields()
            digest = _digest(step)
            if self._received == len(self._digests):
                self._size += step.ByteSize() + STEP_BYTES
                if self._size > GRANT_BYTES:
                    size = f"{self._size} bytes"
                    raise InvalidField("size of a publication's blocks", size, f"at most {GRANT_BYTES}")
                self._mark(step.marks)
                self._digests.append(digest)
                self._fresh.append(step)
            elif digest != self._digests[self._received]:
                raise InvalidField("step of a publication", step.step, "what it was before its home restarted")
            self._received += 1
        if complete is None:
            return
        if complete.steps != self._received:
            expected = f"{self._received}, the steps that came before it"
            raise InvalidField("number of a publication's steps", complete.steps, expected)
        self._told, self._complete = told_with(self._told, complete), True

    def _mark(self, marks: Iterable[pb.PromptMark]) -> None:
        for mark in marks:
            if mark.end in self.marks or not mark.end:
                raise InvalidField("end of a prompt's mark", mark.end, "at least 1, and each once")
            if len(mark.digest) != MARK_BYTES:
                raise InvalidField("prompt's mark", f"{len(mark.digest)} bytes", f"{MARK_BYTES} bytes")
            self.marks[mark.end] = mark.digest
        if len(self.marks) > MAX_MARKS:
            raise InvalidField("number of a prompt's marks", len(self.marks), f"at most {MAX_MARKS}")

    def again(self) -> None:
        """Start to compare: the home sends all steps again, from the first."""
        self._received = 0

    def take(self) -> GrantedPart:
        """Return the blocks of the steps since the last call. Raises `BlocksShort` if a step does not continue where
        the one before ended, or its unfinished blocks where the complete ones end; `InvalidField` if blocks are
        malformed, or not those of which layers were named before, or there are too many blocks or layers."""
        steps, self._fresh = self._fresh, []
        taken = _joined(steps, self._ends, self._blocks)
        self._blocks += sum(len(blocks.ids) for blocks in taken.values())
        for step in steps:
            self._take_unfinished(step)
        unfinished = Unfinished(tuple(self._begun.values()), tuple(sorted(self._layers))) if self._begun else None
        return GrantedPart(taken, self._told, self._complete, unfinished)

    def _take_unfinished(self, step: pb.Blocks) -> None:
        if step.groups:
            _check_same(self._begun, step.groups)
            self._begun, self._layers = {}, set()
        self._ends.update({group.group: group.end_token for group in step.groups})
        if not step.HasField("unfinished"):
            return
        begun = step.unfinished.groups
        if bool(begun) == bool(self._begun):
            expected = "none, until those before are complete" if begun else "at least one group"
            raise InvalidField("unfinished blocks", [group.group for group in begun], expected)
        # Both limits bound the cost of each further layer: a source may name layers one by one.
        self._layers.update(step.unfinished.layers)
        if len(self._layers) > MAX_LAYERS:
            raise InvalidField("number of layers of unfinished blocks", len(self._layers), f"at most {MAX_LAYERS}")
        count = sum(sum(group.run_counts) for group in begun)
        if count > MAX_UNFINISHED:
            raise InvalidField("number of unfinished blocks", count, f"at most {MAX_UNFINISHED}")
        for group in begun:
            _check_continues(group.group, self._ends.get(group.group, group.first_token), group)
            runs = self._begun[group.group] = runs_from_proto(group)
            runs.check(f"unfinished blocks of group {group.group!r}")


def _digest(step: pb.Blocks) -> bytes:
    """Digest the complete blocks of a step, and nothing else: a home that is replaced by a home of another version
    begins to send other fields, or stops."""
    encoded = [group.SerializeToString(deterministic=True) for group in step.groups]
    lengths = repr([len(each) for each in encoded]).encode()
    return hashlib.sha256(b"".join((lengths, *encoded))).digest()


def _check_same(unfinished: Mapping[str, BlockRuns], groups: Iterable[pb.GroupBlocks]) -> None:
    """Check that a step completes the blocks of which some layers may have been read."""
    complete = {group.group: group for group in groups}
    for name, before in ((name, runs.blocks()) for name, runs in unfinished.items()):
        found = blocks_from_proto(complete[name]) if name in complete else Blocks(())
        same = np.array_equal(found.ids[: len(before.ids)], before.ids)
        if not same or found.first_token != before.first_token or (found.end_token or 0) < (before.end_token or 0):
            raise InvalidField("blocks of a publication's step", name, "those of which it named layers before")


def _joined(steps: Iterable[pb.Blocks], ends: Mapping[str, int], blocks_before: int) -> dict[str, Blocks]:
    """Join steps to one list of blocks per group. Groups ended at `ends` in the steps before, which have
    `blocks_before` blocks. Raises the errors of `GrantedSteps.take`."""
    pieces: dict[str, list[pb.GroupBlocks]] = {}
    for step in steps:
        for group in step.groups:
            pieces.setdefault(group.group, []).append(group)
    # Checked before any ids are decoded: a few bytes of runs can stand for any number of ids.
    count = blocks_before + sum(sum(part.run_counts) for parts in pieces.values() for part in parts)
    if count > MAX_BLOCKS:
        raise InvalidField("number of blocks of all groups", count, f"at most {MAX_BLOCKS}")
    joined = {}
    for name, parts in pieces.items():
        whole = parts[0]
        _check_continues(name, ends.get(name, whole.first_token), whole)
        if len(parts) > 1:
            whole = pb.GroupBlocks()
            whole.CopyFrom(parts[0])
        for part in parts[1:]:
            _check_continues(name, whole.end_token, part)
            whole.end_token = part.end_token
            whole.run_starts.extend(part.run_starts)
            whole.run_counts.extend(part.run_counts)
        joined[name] = blocks_from_proto(whole)
    return joined


def _check_continues(group: str, end: int, part: pb.GroupBlocks) -> None:
    if part.first_token != end:
        raise BlocksShort(group, "source", f"tokens from {end}", f"tokens from {part.first_token}")
