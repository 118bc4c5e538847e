"""The arguments of `publish` and `publish_more`, each as one value that every layer passes on, and the messages of the
steps that they make. Steps that every home would refuse are refused here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from kvferry import _arguments as arguments
from kvferry._control.notifier import ADDED_BYTES, SENT_NOTIFY_BYTES, check_size
from kvferry._control.publications import Publication
from kvferry._engine_spec import EngineSpec
from kvferry._prompt import Prompt
from kvferry._wire.geometry_codec import runs_to_proto
from kvferry._wire.reference import engine_ids, parse_reference
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import (
    MAX_LAYERS,
    MAX_RUNS,
    MAX_UNFINISHED,
    BlockIds,
    BlockRuns,
    Blocks,
    blocks_by_group,
    check_ids,
    check_published,
    without_nulls,
)
from kvferry.geometry.model import GroupKind
from kvferry.v1 import kv_transfer_pb2 as pb

MAX_LAYER_NAME = 256
"""Most bytes of a layer's name; the contract's limit."""

MAX_PAYLOAD = 64 << 10
"""Most bytes of a publication's payload; the contract's limit."""


@dataclass(frozen=True)
class _Step:
    """The fields that `Publish` and `PublishMore` share."""

    _: KW_ONLY
    last: bool
    payload: bytes = field(default=b"", repr=False)
    layers: Collection[str] | None = None
    prompt: Prompt = Prompt.unknown

    def __post_init__(self) -> None:
        self._set("last", arguments.flag("last", self.last))
        self._set("payload", arguments.payload("payload", self.payload))
        arguments.instance("prompt", self.prompt, Prompt, "a Prompt")
        if len(self.payload) > MAX_PAYLOAD:
            raise InvalidField("payload", f"{len(self.payload)} bytes", f"at most {MAX_PAYLOAD} bytes")
        if self.payload and not self.last:
            raise InvalidField("payload", f"{len(self.payload)} bytes", "none before the last step")
        if self.layers is not None:
            self._set("layers", self._named(self.layers))

    def _named(self, layers: Collection[str]) -> tuple[str, ...]:
        names = sorted(set(arguments.texts("layers", layers)))
        if not 1 <= len(names) <= MAX_LAYERS:
            raise InvalidField("layers", f"{len(names)} names", f"1 to {MAX_LAYERS} of layers; None: all are complete")
        for name in names:
            if not 1 <= len(name.encode()) <= MAX_LAYER_NAME:
                raise InvalidField("layers", name[:80], f"names of 1 to {MAX_LAYER_NAME} bytes")
        if self.last:
            raise InvalidField("layers", names[:3], "None with the last blocks: all layers are complete")
        return tuple(names)

    def _set(self, name: str, checked: object) -> None:
        object.__setattr__(self, name, checked)


@dataclass(frozen=True)
class Publish(_Step):
    """The arguments of `EngineSession.publish` and `SchedulerPort.publish`.

    Attributes:
        request_id: the source's name for the request, 1 to 256 bytes, printable.
        blocks: the blocks by group; `Blocks.end_token` is the end of the tokens that they hold.
        last: no more blocks will follow; if False, `publish_more` publishes them.
        payload: opaque bytes for the readers, at most 64 KiB.
        layers: names of the layers that are complete in these blocks; None: all. If some are not, `last` is False, and
            `publish_more` names the others.
        prompt: the whole prompt from which the blocks are computed, also if only a part is published. Readers can
            refuse the blocks for any other prompt.
        expected_reads: how many reads will be made (n-way sampling); the blocks are released after the last.
        checksums: every rank will call `Cache.checksum` for these blocks, so that readers in integrity mode wait for
            the sums.
        traceparent: the W3C traceparent that came with the request; empty: none did. See docs/monitoring.md.
        reference: the reference that a router made for this request, and sent to the reader as well; empty: none did.
            See docs/routers.md.
    """

    request_id: str
    blocks: Mapping[str, Blocks]
    _: KW_ONLY
    last: bool = True
    expected_reads: int = 1
    checksums: bool = False
    traceparent: str = ""
    reference: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.label("request_id", self.request_id)
        self._set("blocks", blocks_by_group("blocks", self.blocks))
        self._set("expected_reads", arguments.integer("expected_reads", self.expected_reads, 1, 2**31 - 1))
        self._set("checksums", arguments.flag("checksums", self.checksums))
        arguments.text("traceparent", self.traceparent)
        arguments.text("reference", self.reference)


@dataclass(frozen=True)
class PublishMore(_Step):
    """The arguments of `EngineSession.publish_more` and `SchedulerPort.publish_more`.

    Attributes:
        publication: the value that `publish` returned.
        blocks: the new blocks by group; may be empty.
        last, payload: see `Publish`; the payload comes with the last blocks.
        layers: names of the layers that are complete in the new blocks, which must be full blocks of groups of kind
            TOKENS. While some layers are not complete, further calls name more layers and give no blocks. A call
            without `layers` completes all layers, and may give further complete blocks, too.
        prompt: the prompt with the tokens generated since (`Prompt.followed_by`), if their blocks are published.
    """

    publication: Publication
    blocks: Mapping[str, Blocks]

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.instance("publication", self.publication, Publication, "the Publication that publish returned")
        self._set("blocks", blocks_by_group("blocks", self.blocks))


def new_step(spec: EngineSpec, given: Publish | PublishMore) -> tuple[dict[str, BlockIds], pb.Publish]:
    """Make a step without its numbers. Returns the ids of its blocks by group, and the step. Raises the errors of
    `EngineSession.publish` that need no home."""
    blocks = {name: without_nulls(spec.group(name), listed) for name, listed in given.blocks.items()}
    groups = [_encoded(spec, name, listed, last=given.last) for name, listed in blocks.items()]
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
    these blocks (`begun`; empty: there are none), they are added to it. Raises `InvalidField` if the step names layers
    of no blocks, begins other blocks, continues elsewhere, or has too many runs, and `MessageTooLarge` if no message
    holds it."""
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


def _encoded(spec: EngineSpec, name: str, blocks: Blocks, *, last: bool) -> pb.GroupBlocks:
    group = spec.group(name)
    check_ids(name, "source", blocks.ids, group.num_blocks, group.null_block)
    runs = BlockRuns.of_blocks(name, blocks, group.block_tokens)
    # The home would refuse the step, and with it the publication.
    check_published(group, f"blocks[{name!r}]", runs, last=last)
    return runs_to_proto(runs)
