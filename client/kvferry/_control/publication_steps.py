"""Makes the messages of a publication's steps, and refuses steps that every home would refuse."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry._control.batches import ADDED_BYTES, SENT_NOTIFY_BYTES, check_size
from kvferry._control.publish import Publish, PublishMore
from kvferry._engine_spec import EngineSpec
from kvferry._wire.blocks_codec import blocks_to_proto
from kvferry._wire.reference import engine_ids, parse_reference
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import MAX_RUNS, MAX_UNFINISHED, BlockIds, Blocks, check_ids, without_nulls
from kvferry.geometry.model import GroupKind
from kvferry.v1 import kv_transfer_pb2 as pb


def new_step(spec: EngineSpec, given: Publish | PublishMore) -> tuple[dict[str, BlockIds], pb.Publish]:
    """Make a step without its numbers. Returns the ids of its blocks by group, and the step.

    Raises:
        BadBlock: an id out of range, or the null block.
        BadReference: the string is not a reference.
        InvalidField: an argument does not fit the engine.
        MessageTooLarge: no message holds it.
    """
    blocks = {name: without_nulls(spec.group(name), listed) for name, listed in given.blocks.items()}
    groups = [_encoded(spec, name, listed) for name, listed in blocks.items()]
    step = pb.Publish(last=given.last, payload=given.payload)
    if isinstance(given, Publish):
        step.request_id, step.expected_reads, step.checksums = given.request_id, given.expected_reads, given.checksums
        if given.reference:
            step.router_key, step.key = _routed(given.reference, spec.engine_id)
    if given.layers is None:
        step.groups.extend(groups)
    else:
        _check_unfinished(spec, groups)
        step.unfinished.CopyFrom(pb.Unfinished(groups=groups, layers=given.layers))
    check_size("a step of a publication", step, SENT_NOTIFY_BYTES, ADDED_BYTES)
    return {name: listed.ids for name, listed in blocks.items()}, step


def _check_unfinished(spec: EngineSpec, groups: Sequence[pb.GroupBlocks]) -> None:
    count = sum(sum(group.run_counts) for group in groups)
    if count > MAX_UNFINISHED:
        expected = f"at most {MAX_UNFINISHED} of which only some layers are complete"
        raise InvalidField("blocks", f"{count} blocks", expected)
    for encoded in groups:
        group = spec.group(encoded.group)
        if group.kind is not GroupKind.TOKENS or encoded.end_token % group.block_tokens:
            expected = "full blocks of a group of kind TOKENS, where only some layers are complete"
            raise InvalidField(f"blocks[{group.name!r}]", f"{group.kind.name} up to {encoded.end_token}", expected)


def _routed(reference: str, engine_id: str) -> tuple[str, bytes]:
    """Return router_key and key of the reference under which an engine publishes; raises `BadReference`, and
    `InvalidField` if no router made it, or it names another engine."""
    parsed = parse_reference(reference)
    if not parsed.router_key:
        raise InvalidField("reference", "a publication's own", "one that a router made, see kvferry.router_reference")
    named = engine_ids(parsed.engine_id, parsed.data_parallel_rank)
    if engine_id not in named:
        raise InvalidField("reference", f"one for engine {' or '.join(named)}", f"one for this engine, {engine_id!r}")
    return parsed.router_key, parsed.key


def follow(begun: Sequence[pb.GroupBlocks], step: pb.Publish) -> None:
    """Check that the next step continues the blocks of which the steps before named some layers. If the step completes
    these blocks (`begun`; empty: there are none), they are added to it.

    Raises:
        InvalidField: the step names layers of no blocks, begins other blocks, continues elsewhere, or has too many
            runs.
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
