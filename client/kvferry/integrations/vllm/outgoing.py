"""The requests that prefill will publish: holds their blocks, and publishes requests with a router's reference in parts
while their prompts are computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Prompt, Publication
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError, RouterKeyUsed
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.block_hold import Holds, ids_of
from kvferry.integrations.vllm.publishing import ComputedPart, OutgoingRequest, Summed
from kvferry.integrations.vllm.remembered import Remembered
from kvferry.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

STUCK = 2.0
"""Seconds without any computing after which a preempted request's publication is withdrawn, so that the request gets
the memory that its publication holds."""

MOST_USED = 1024
"""Most remembered references of publications. A sample that comes after its reference was forgotten is refused."""

BlockIds = Callable[[str], Sequence[Sequence[int]]]
"""Returns the ids of a request's blocks, by vLLM's groups."""


class OutgoingRequests:
    """The requests that will be published, until they finish. Publishes the parts of prompts that have a router's
    reference, and holds all published blocks until their release.

    A part is the full blocks that a step of vLLM has completed in groups that keep all tokens. A part is published when
    the step has ended and every rank's device has computed it. The rest follows at the end of the request: the last
    block, windows, states. Parts have only tokens of the prompt, because vLLM may sample other tokens again, and no
    block that a drafter may still write to, which vLLM does not take for its prefix cache either.

    vLLM frees the blocks of a request that it preempts, and computes the request again, in other blocks if the old ones
    are no longer in its prefix cache. The publication keeps its blocks, and goes on with the new blocks of later
    tokens. If publications hold so much memory that vLLM can compute nothing, the publication of a preempted request is
    withdrawn.

    Args:
        setup: the engine.
        port: the engine's port.
        holds: the holds of all publications.
        count: adds to a count by its name, see `KvferryStats`.
        sums: receives the published parts: integrity mode sums them.
    """

    def __init__(
        self, setup: Setup, port: SchedulerPort, holds: Holds, count: Callable[[str], None], sums: list[Summed]
    ) -> None:
        self._setup = setup
        self._port = port
        self._holds = holds
        self._count = count
        self._sums = sums
        self._now = time.monotonic
        self._ended = dict.fromkeys(range(setup.spec.num_ranks), 0)
        self._step = 0
        self._block_ids: BlockIds | None = None
        self._requests: dict[str, OutgoingRequest] = {}
        self._with_parts: dict[str, OutgoingRequest] = {}
        """Those of `_requests` that have unpublished parts, so that a step costs nothing for the others."""
        self._by_publication: dict[int, OutgoingRequest] = {}
        """Those of `_requests` of which parts are published, by the number of their publication; none after its
        release."""
        self._followers: dict[str, OutgoingRequest] = {}
        """Other samples of the same prompt (n > 1), which have the same reference."""
        self._used = Remembered[str](MOST_USED)
        """References of publications."""
        self._idle_since: float | None = None

    def bind(self, block_ids: BlockIds) -> None:
        """Take the function that returns a request's blocks. Without it, requests are published when they finish."""
        self._block_ids = block_ids

    @property
    def waiting(self) -> bool:
        """Whether parts wait for the end of a step."""
        return bool(self._with_parts)

    def expect(self, request: Any, reference: str, prompt: Prompt, traceparent: str) -> None:
        """Add an arrived request that is to be published, under a router's reference unless that is empty."""
        outgoing = OutgoingRequest(request, reference, prompt, self._holds.begin(), traceparent, self._step)
        # The prompt of a session grows, and its last tokens are computed again.
        outgoing.closed = not reference or self._block_ids is None or bool(getattr(request, "resumable", False))
        # A sample may come when the first sample has ended.
        follows = bool(reference) and (
            reference in self._used or any(other.reference == reference for other in self._requests.values())
        )
        (self._followers if follows else self._requests)[outgoing.request_id] = outgoing

    def prompt(self, request_id: str) -> Prompt:
        """Return the prompt of an expected request, as it arrived; otherwise `Prompt.unknown`."""
        outgoing = self._requests.get(request_id) or self._followers.get(request_id)
        return Prompt.unknown if outgoing is None else outgoing.prompt

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """Begin a step, with the number of computed tokens by request; return the step's number, from 1."""
        self._step += 1
        for known in (self._requests, self._followers):
            for request_id in scheduled if known else ():
                outgoing = known.get(request_id)
                if outgoing is None:
                    continue
                outgoing.step = self._step
                if known is self._requests and not outgoing.closed:
                    self._plan(outgoing, outgoing.request.num_computed_tokens + scheduled[request_id])
        self._withdraw_if_stuck(idle=not scheduled)
        return self._step

    def ended(self, steps: Mapping[int, int]) -> None:
        """Take the last ended step of some ranks, and publish the parts that all ranks have computed."""
        for rank, step in steps.items():
            self._ended[rank] = max(self._ended[rank], step)
        everywhere = min(self._ended.values())
        for outgoing in list(self._with_parts.values()):
            while outgoing.parts and outgoing.parts[0].step <= everywhere:
                self._publish(outgoing, outgoing.parts[0].blocks)

    def lost(self, blocks: Iterable[int]) -> None:
        """Handle blocks into which another connector could not load: vLLM computes these blocks again, in place, and
        all blocks that were computed from them.

        With two steps under way, a worker's news may report the end of a step before the step's output names such
        blocks. A publication that has them by then is withdrawn.
        """
        bad = set(blocks)
        for outgoing in self._requests.values():
            if any(not bad.isdisjoint(ids_of(part.blocks)) for part in outgoing.parts):
                self._forget_parts(outgoing)
                outgoing.closed = True
            if outgoing.held.any_of(bad) and not outgoing.withdrawn:
                logger.warning("request %r: blocks that are published could not be loaded", outgoing.request_id)
                self._forget_parts(outgoing)
                self._withdraw(outgoing)

    def follows(self, request_id: str) -> bool:
        """Forget a finished request if it is another sample of a published request; return whether it is."""
        return self._followers.pop(request_id, None) is not None

    def take(self, request: Any) -> OutgoingRequest:
        """Remove a finished request, and return it."""
        outgoing = self._requests.pop(request.request_id, None)
        if outgoing is None:
            return OutgoingRequest(request, "", Prompt.unknown, self._holds.begin(), step=self._step)
        self._forget_parts(outgoing)
        if outgoing.publication is not None:
            self._by_publication.pop(outgoing.publication.number, None)
        return outgoing

    def rest(self, outgoing: OutgoingRequest, blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Return the unpublished blocks of a finished request, and hold them."""
        found = {
            table.group.name: table.rest(blocks[table.group.name], outgoing.published.get(table.group.name, 0))
            for table in self._setup.tables
        }
        outgoing.held.add(found)
        return found

    def keep(self, outgoing: OutgoingRequest, publication: Publication) -> bool:
        """Keep a request's hold until its publication is released, see `Holds.keep`."""
        if outgoing.reference:
            self._used.add(outgoing.reference)
        return self._holds.keep(publication.number, outgoing.held)

    def give_up(self, outgoing: OutgoingRequest, *, decline: bool = True) -> None:
        """Handle a request of `take` of which no more blocks will be published. `decline`: no other request publishes
        under its reference."""
        if outgoing.publication is not None:
            if not outgoing.withdrawn:
                self._withdraw(outgoing)
            return
        outgoing.held.free()
        if outgoing.withdrawn or not decline or not outgoing.reference:
            return
        for request_id, follower in self._followers.items():
            if follower.reference == outgoing.reference:
                self._requests[request_id] = self._followers.pop(request_id)
                return
        try:
            # Decode waits for the publication.
            self._port.decline(outgoing.reference)
        except KvferryError as error:
            logger.info("could not decline the reference of request %r: %s", outgoing.request_id, error)

    def released(self, publication: int) -> None:
        """Drop the hold of a publication, whose blocks are free again."""
        outgoing = self._by_publication.pop(publication, None)
        if outgoing is not None:
            # The reader has given up, or died.
            outgoing.held = self._holds.begin()
            self._forget_parts(outgoing)
            outgoing.closed = outgoing.withdrawn = True

    # Internal.

    def _plan(self, outgoing: OutgoingRequest, tokens: int) -> None:
        """Plan to publish the blocks of a prompt that this step completes; none, if vLLM's blocks are not known."""
        if self._block_ids is None:
            return
        # The last token is left for the end of the request, which must publish at least one block.
        tokens = min(tokens - self._setup.rewritten, outgoing.request.num_prompt_tokens - 1)
        if not self._is_longer(outgoing, tokens):
            return
        ids = self._block_ids(outgoing.request_id)
        blocks = {}
        for table in self._setup.tables:
            name = table.group.name
            found = table.early(ids[table.index], outgoing.planned.get(name, 0), tokens)
            if len(found.ids):
                blocks[name] = found
                outgoing.planned[name] = found.end_token or 0
        if blocks:
            # Held from now on, because vLLM may free the blocks before the step has ended.
            outgoing.held.add(blocks)
            outgoing.parts.append(ComputedPart(self._step, blocks))
            self._with_parts[outgoing.request_id] = outgoing

    def _is_longer(self, outgoing: OutgoingRequest, tokens: int) -> bool:
        """Whether the tokens fill another block of some group."""
        return any(
            tokens // table.entry_tokens * table.entry_tokens > outgoing.planned.get(table.group.name, 0)
            for table in self._setup.tables
            if not table.forgets
        )

    def _publish(self, outgoing: OutgoingRequest, blocks: Mapping[str, Blocks]) -> None:
        try:
            if outgoing.publication is None:
                outgoing.publication = self._port.publish(
                    outgoing.request_id,
                    blocks,
                    last=False,
                    checksums=self._setup.sums,
                    traceparent=outgoing.traceparent,
                    reference=outgoing.reference,
                    prompt=outgoing.prompt,
                )
                self._by_publication[outgoing.publication.number] = outgoing
                self.keep(outgoing, outgoing.publication)
                self._count("published")
            else:
                self._port.publish_more(outgoing.publication, blocks, last=False)
        except KvferryError as error:
            logger.warning("request %r could not be published: %s", outgoing.request_id, error)
            self._forget_parts(outgoing)
            outgoing.closed = True
            # The reference of another publication must not be declined.
            outgoing.withdrawn = isinstance(error, RouterKeyUsed)
            if outgoing.publication is not None:
                self._withdraw(outgoing)
            return
        outgoing.parts.popleft()
        if not outgoing.parts:
            del self._with_parts[outgoing.request_id]
        self._sums.append(Summed(outgoing.publication.number, blocks, last=False))
        outgoing.published |= {name: listed.end_token or 0 for name, listed in blocks.items()}

    def _forget_parts(self, outgoing: OutgoingRequest) -> None:
        """Free the blocks of unpublished parts."""
        for part in outgoing.parts:
            outgoing.held.drop(part.blocks)
        outgoing.parts.clear()
        self._with_parts.pop(outgoing.request_id, None)
        outgoing.planned = dict(outgoing.published)

    def _withdraw(self, outgoing: OutgoingRequest) -> None:
        outgoing.closed = outgoing.withdrawn = True
        if outgoing.publication is None:
            return
        try:
            self._port.abort(outgoing.publication)
        except KvferryError as error:
            logger.info("could not withdraw the publication of request %r: %s", outgoing.request_id, error)

    def _withdraw_if_stuck(self, *, idle: bool) -> None:
        """Withdraw a publication of a preempted request if nothing has been computed for long."""
        preempted = [
            outgoing
            for outgoing in (self._by_publication.values() if idle else ())
            if not outgoing.withdrawn and outgoing.request.status is RequestStatus.PREEMPTED
        ]
        if not preempted:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        elif self._now() - self._idle_since > STUCK:
            self._idle_since = None
            # The last that was published, because vLLM computes the others first.
            outgoing = preempted[-1]
            logger.warning(
                "request %r was preempted, and the blocks that are published keep it from being computed again: its "
                "publication is withdrawn",
                outgoing.request_id,
            )
            self._forget_parts(outgoing)
            self._withdraw(outgoing)
