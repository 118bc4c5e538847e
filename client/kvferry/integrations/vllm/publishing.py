"""Publishes requests in vLLM's scheduler, each after every rank's device has computed it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry import Prompt, Publication
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.block_hold import BlockHold
from kvferry.integrations.vllm.params import traceparent_of

logger = logging.getLogger(__name__)


class ComputedPart(NamedTuple):
    """Blocks that may be published when `step` has ended."""

    step: int
    blocks: Mapping[str, Blocks]


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request that will be published.

    Attributes:
        request: vLLM's request.
        reference: the one that its router made; empty: none, and it is published when it has finished.
        prompt: its prompt when it arrived.
        held: the blocks that are published or will be soon.
        traceparent: of the trace that it belongs to; empty: none.
        step: the last in which it was scheduled.
        publication: what its first part was published as; None: nothing is published yet.
        parts: computed blocks that are not published yet, because their step has not ended.
        published: end of the published tokens, by group.
        planned: the same, with the parts.
        closed: no more of it is published before its end, or at all.
        withdrawn: its publication has failed, was released early, or was withdrawn.
    """

    request: Any
    reference: str = field(repr=False)
    prompt: Prompt
    held: BlockHold
    traceparent: str = ""
    step: int = 0
    publication: Publication | None = None
    parts: deque[ComputedPart] = field(default_factory=deque)
    published: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    withdrawn: bool = False

    @property
    def request_id(self) -> str:
        """vLLM's request_id."""
        return str(self.request.request_id)


class _HeldBack(NamedTuple):
    """A publication whose blocks are not published yet, because some rank has not computed `step`."""

    step: int
    publication: Publication
    blocks: Mapping[str, Blocks]
    payload: bytes
    prompt: Prompt


class Summed(NamedTuple):
    """Published blocks that integrity mode sums: number of the publication, blocks, whether no others follow."""

    publication: int
    blocks: Mapping[str, Blocks]
    last: bool = True


class ComputedPublishing:
    """Publishes requests when all ranks have computed the last step in which they were scheduled.

    `kvferry.integrations.vllm.device` has the reasons, and how the ranks know. vLLM asks for the reference when a
    request finishes. So a request that is not computed everywhere is published without blocks first, and its reader
    waits for them. This costs one more message to the home.

    Args:
        port: the engine's port.
        ranks: number of ranks.
        sums: takes what is published: integrity mode sums it.
        checksums: whether the source will sum the blocks, see `EngineSession.publish`.
    """

    def __init__(self, port: SchedulerPort, ranks: int, sums: list[Summed], *, checksums: bool = False) -> None:
        self._port = port
        self._sums = sums
        self._checksums = checksums
        self._computed = dict.fromkeys(range(ranks), 0)
        self._held: deque[_HeldBack] = deque()

    @property
    def waiting(self) -> bool:
        """Whether blocks are held until more steps are computed."""
        return bool(self._held)

    def publish(
        self, outgoing: OutgoingRequest, blocks: Mapping[str, Blocks], *, prompt: Prompt, payload: bytes = b""
    ) -> Publication:
        """Publish the blocks of a finished request that are not published yet, as soon as they are computed. The
        payload goes with the last blocks, the marks of the prompt with the first. Errors as `SchedulerPort.publish` and
        `SchedulerPort.publish_more`."""
        now, publication = outgoing.step <= min(self._computed.values()), outgoing.publication
        if publication is None:
            publication = self._port.publish(
                outgoing.request_id,
                blocks if now else {},
                last=now,
                payload=payload if now else b"",
                checksums=self._checksums,
                traceparent=outgoing.traceparent or traceparent_of(outgoing.request),
                reference=outgoing.reference,
                prompt=prompt,
            )
        elif now:
            self._port.publish_more(publication, blocks, last=True, payload=payload, prompt=prompt)
        if now:
            self._sums.append(Summed(publication.number, blocks))
        else:
            self._held.append(_HeldBack(outgoing.step, publication, blocks, payload, prompt))
        return publication

    def computed(self, steps: Mapping[int, int]) -> None:
        """Take the last step that each of some ranks has computed, and publish what was held until then."""
        for rank, step in steps.items():
            self._computed[rank] = max(self._computed[rank], step)
        everywhere = min(self._computed.values())
        # Requests finish in the order of their last steps, or nearly: one that waits behind another is only later.
        while self._held and self._held[0].step <= everywhere:
            held = self._held.popleft()
            try:
                self._port.publish_more(
                    held.publication, held.blocks, last=True, payload=held.payload, prompt=held.prompt
                )
                self._sums.append(Summed(held.publication.number, held.blocks))
            except KvferryError as error:
                # Released in the meantime, or its blocks were refused: nobody can read it, and `released` has it.
                logger.warning("request %r could not be published: %s", held.publication.request_id, error)
                self._port.abort(held.publication)
