"""Makes the messages of a publication's steps, and refuses what every home would refuse, before it is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvferry import _arguments as arguments
from kvferry._control.batches import ADDED_BYTES, SENT_NOTIFY_BYTES, check_size
from kvferry._engine_spec import EngineSpec
from kvferry._wire.blocks_codec import blocks_to_proto
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import (
    MAX_LAYERS,
    MAX_RUNS,
    MAX_UNFINISHED,
    Blocks,
    blocks_by_group,
    check_ids,
    without_nulls,
)
from kvferry.geometry.model import GroupKind
from kvferry.v1 import kv_transfer_pb2 as pb

MAX_LAYER_NAME = 256
"""Most bytes of a layer's name; the contract's limit."""

MAX_PAYLOAD = 64 << 10
"""Most bytes of a publication's payload; the contract's limit."""


def new_step(
    spec: EngineSpec,
    blocks: Mapping[str, Blocks],
    *,
    last: bool,
    payload: bytes,
    layers: Collection[str] | None,
) -> pb.Publish:
    """Make a step without its numbers.

    Args:
        spec: the engine.
        blocks: what groups gain.
        last: no step follows.
        payload: opaque bytes for the readers.
        layers: names of the layers that are complete in the blocks; None: all.

    Raises:
        BadBlock: an id out of range, or the null block.
        InvalidField: an argument is out of range.
        MessageTooLarge: no message holds it.
    """
    groups = [_encoded(spec, name, listed) for name, listed in blocks.items()]
    step = pb.Publish(last=arguments.flag("last", last), payload=arguments.payload("payload", payload))
    if len(step.payload) > MAX_PAYLOAD:
        raise InvalidField("payload", f"{len(step.payload)} bytes", f"at most {MAX_PAYLOAD} bytes")
    if step.payload and not step.last:
        raise InvalidField("payload", f"{len(step.payload)} bytes", "none before the last step")
    if layers is None:
        step.groups.extend(groups)
    else:
        step.unfinished.CopyFrom(_unfinished(spec, groups, layers, last=step.last))
    check_size("a step of a publication", step, SENT_NOTIFY_BYTES, ADDED_BYTES)
    return step


def _unfinished(
    spec: EngineSpec, groups: Sequence[pb.GroupBlocks], layers: Collection[str], *, last: bool
) -> pb.Unfinished:
    names = sorted(set(arguments.texts("layers", layers)))
    if not 1 <= len(names) <= MAX_LAYERS:
        raise InvalidField("layers", f"{len(names)} names", f"1 to {MAX_LAYERS} of layers; None: all are complete")
    for name in names:
        if not 1 <= len(name.encode()) <= MAX_LAYER_NAME:
            raise InvalidField("layers", name[:80], f"names of 1 to {MAX_LAYER_NAME} bytes")
    count = sum(sum(group.run_counts) for group in groups)
    if count > MAX_UNFINISHED:
        expected = f"at most {MAX_UNFINISHED} of which only some layers are complete"
        raise InvalidField("blocks", f"{count} blocks", expected)
    if last:
        raise InvalidField("layers", names[:3], "None with the last blocks: all layers are complete")
    for encoded in groups:
        group = spec.group(encoded.group)
        if group.kind is not GroupKind.TOKENS or encoded.end_token % group.block_tokens:
            expected = "full blocks of a group of kind TOKENS, where only some layers are complete"
            raise InvalidField(f"blocks[{group.name!r}]", f"{group.kind.name} up to {encoded.end_token}", expected)
    return pb.Unfinished(groups=groups, layers=names)


def offered(spec: EngineSpec, blocks: object) -> dict[str, Blocks]:
    """The blocks that a source offers, by group, of a mapping that is given; raises `InvalidField`."""
    given = blocks_by_group("blocks", blocks)
    return {name: without_nulls(spec.group(name), listed) for name, listed in given.items()}


def follow(begun: Sequence[pb.GroupBlocks], step: pb.Publish) -> None:
    """Check that a step continues what the steps before it left unfinished. If it completes that, give it the blocks.

    Args:
        begun: the blocks of which the steps before named some layers; empty: there are none.
        step: the next step, which is changed.

    Raises:
        InvalidField: it names layers of no blocks, begins other blocks, continues elsewhere, or has too many runs.
        MessageTooLarge: no message holds it.
    """
    if step.HasField("unfinished"):
        given = [group.group for group in step.unfinished.groups]
        if bool(given) == bool(begun):
            expected = (
                "none, until all layers of those before are complete" if given else "those that have these layers"
            )
            raise InvalidField("blocks", given, expected)
    else:
        _complete(begun, step)
    runs = sum(len(group.run_starts) for group in (*step.groups, *step.unfinished.groups))
    if runs > MAX_RUNS:
        expected = f"at most {MAX_RUNS}, with the blocks that the step completes: more go into further steps"
        raise InvalidField("runs of block ids of a step", runs, expected)
    check_size("a step of a publication", step, SENT_NOTIFY_BYTES, ADDED_BYTES)


def _complete(begun: Sequence[pb.GroupBlocks], step: pb.Publish) -> None:
    more = {group.group: group for group in step.groups}
    for before in begun:
        whole = pb.GroupBlocks()
        whole.CopyFrom(before)
        group = more.get(before.group)
        if group is None:
            step.groups.append(whole)
            continue
        if group.first_token != before.end_token:
            expected = f"{before.end_token}, where the step before ended"
            raise InvalidField(f"first token of blocks[{before.group!r}]", group.first_token, expected)
        whole.end_token = group.end_token
        whole.run_starts.extend(group.run_starts)
        whole.run_counts.extend(group.run_counts)
        group.CopyFrom(whole)


def _encoded(spec: EngineSpec, name: str, blocks: Blocks) -> pb.GroupBlocks:
    group = spec.group(name)
    check_ids(name, "source", blocks.ids, group.num_blocks, group.null_block)
    return blocks_to_proto(name, blocks, group.block_tokens)
