"""The arguments of `publish` and `publish_more`, each as one value that every layer passes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field

from kvferry import _arguments as arguments
from kvferry._control.publications import Publication
from kvferry._prompt import Prompt
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import MAX_LAYERS, Blocks, blocks_by_group

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
        last: no more blocks will follow.
        payload: opaque bytes for the readers, at most 64 KiB; with the last blocks.
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
