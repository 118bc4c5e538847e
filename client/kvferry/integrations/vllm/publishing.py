"""Publishes requests in vLLM's scheduler, each after every rank's device has computed it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvferry import Prompt, Publication
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks

logger = logging.getLogger(__name__)


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
        self._step = 0
        self._scheduled: dict[str, int] = {}
        """The last step in which each request was scheduled."""
        self._held: deque[_HeldBack] = deque()

    @property
    def waiting(self) -> bool:
        """Whether blocks are held until more steps are computed."""
        return bool(self._held)

    def expect(self, request_id: str) -> None:
        """Note that a request will be published when it has finished."""
        self._scheduled[request_id] = self._step

    def begin(self, scheduled: Iterable[str]) -> int:
        """Begin a step in which these requests are scheduled.

        Returns:
            The number of the step, from 1.
        """
        self._step += 1
        if self._scheduled:
            for request_id in scheduled:
                if request_id in self._scheduled:
                    self._scheduled[request_id] = self._step
        return self._step

    def forget(self, request_id: str) -> None:
        """Note that a request has ended, and will not be published."""
        self._scheduled.pop(request_id, None)

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        traceparent: str = "",
        *,
        prompt: Prompt,
        reference: str = "",
        payload: bytes = b"",
        publication: Publication | None = None,
    ) -> Publication:
        """Publish a finished request as soon as it is computed, under a router's reference if there is one. The payload
        goes with the last blocks, the marks of the prompt with the first. Errors as `SchedulerPort.publish` and
        `SchedulerPort.publish_more`.

        Args:
            request_id: the request.
            blocks: those that are not published yet.
            traceparent: of the trace that it belongs to; empty: none.
            prompt: its prompt.
            reference: the router's reference; empty: none.
            payload: for the reader's engine.
            publication: has the first blocks; None: it is made now.
        """
        step = self._scheduled.pop(request_id, self._step)
        now = step <= min(self._computed.values())
        if publication is None:
            publication = self._port.publish(
                request_id,
                blocks if now else {},
                last=now,
                payload=payload if now else b"",
                checksums=self._checksums,
                traceparent=traceparent,
                reference=reference,
                prompt=prompt,
            )
        elif now:
            self._port.publish_more(publication, blocks, last=True, payload=payload, prompt=prompt)
        if now:
            self._sums.append(Summed(publication.number, blocks))
        else:
            self._held.append(_HeldBack(step, publication, blocks, payload, prompt))
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
