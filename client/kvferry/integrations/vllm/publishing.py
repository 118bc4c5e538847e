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
    """Blocks that are published when `step` has ended."""

    step: int
    blocks: Mapping[str, Blocks]


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request that will be published.

    Attributes:
        request: vLLM's request.
        reference: the router's reference; empty: none, and the request is published when it has finished.
        prompt: the prompt at the request's arrival.
        held: the blocks that are published or will be soon.
        traceparent: of the request's trace; empty: none.
        step: the last step in which the request was scheduled.
        publication: None: no part is published yet.
        parts: blocks that are not published yet, because their step has not ended.
        published: end of the published tokens, by group.
        planned: the same, with the parts.
        closed: no more parts are published before the end of the request, or ever.
        withdrawn: the publication has failed, was released early, or was withdrawn.
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
        return str(self.request.request_id)


class _HeldBack(NamedTuple):
    """A publication whose blocks are not published yet, because some rank has not computed `step`."""

    step: int
    publication: Publication
    blocks: Mapping[str, Blocks]
    payload: bytes
    prompt: Prompt


class Summed(NamedTuple):
    """Published blocks for the sums of integrity mode: number of the publication, blocks, whether they are the last."""

    publication: int
    blocks: Mapping[str, Blocks]
    last: bool = True


class ComputedPublishing:
    """Publishes requests when all ranks have computed the last step in which they were scheduled, for the reasons in
    `kvferry.integrations.vllm.device`.

    vLLM needs the reference when a request finishes. So a request that some rank has not computed is published without
    blocks first, and its reader waits for the blocks. This costs one more message to the home.

    Args:
        port: the engine's port.
        ranks: number of ranks.
        sums: receives the published blocks: integrity mode sums them.
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
        """Publish the remaining blocks of a finished request as soon as they are computed: with the payload, and the
        marks of the prompt with the first blocks. Errors as `SchedulerPort.publish` and
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
        """Take the last computed step of some ranks, and publish blocks that were held back until that step."""
        for rank, step in steps.items():
            self._computed[rank] = max(self._computed[rank], step)
        everywhere = min(self._computed.values())
        # Requests finish nearly in the order of their last steps: waiting behind another request only delays them.
        while self._held and self._held[0].step <= everywhere:
            held = self._held.popleft()
            try:
                self._port.publish_more(
                    held.publication, held.blocks, last=True, payload=held.payload, prompt=held.prompt
                )
                self._sums.append(Summed(held.publication.number, held.blocks))
            except KvferryError as error:
                # The publication was released, or its blocks were refused: it cannot be read, and `released` follows.
                logger.warning("request %r could not be published: %s", held.publication.request_id, error)
                self._port.abort(held.publication)
