"""The requests that prefill will publish: what is held of each, and those under references that routers made in parts,
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
"""Seconds without any computing after which a preempted request's publication is withdrawn, so that the request can
have the memory that it holds."""

MOST_USED = 1024
"""References that are remembered of what was published. A sample that comes after its own was forgotten is refused."""

BlockIds = Callable[[str], Sequence[Sequence[int]]]
"""Returns the ids of a request's blocks, by vLLM's groups."""


class OutgoingRequests:
    """The requests that will be published, until they finish. Publishes the parts of prompts that have a router's
    reference, and holds the blocks of all until they are released.

    A part is the full blocks that a step of vLLM has completed in groups that keep all tokens. It is published when the
    step has ended and every rank's device has computed it. What is left comes at the end of the request: the last
    block, windows, states. Only tokens of the prompt are published before: vLLM may sample others again. Nor is a block
    that a drafter may still write to: vLLM does not take it for its prefix cache either.

    vLLM frees the blocks of a request that it preempts, and computes it again, in other blocks where it does not find
    the old ones in its prefix cache. The publication keeps what it has, and goes on with the new blocks of later
    tokens. If nothing can be computed any more, because the memory is full of what publications hold, that of a
    preempted request is withdrawn.

    Args:
        setup: the engine.
        port: its port.
        holds: what is held of all publications.
        count: counts something by its name, see `KvferryStats`.
        sums: takes the parts that are published: integrity mode sums them.
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
        """Each by its request_id."""
        self._followers: dict[str, OutgoingRequest] = {}
        """Other samples of the same prompt (n > 1), which have the same reference."""
        self._used = Remembered[str](MOST_USED)
        """References under which something was published."""
        self._idle_since: float | None = None

    def bind(self, block_ids: BlockIds) -> None:
        """Take what returns the blocks of a request. Without it, requests are published when they have finished."""
        self._block_ids = block_ids

    @property
    def waiting(self) -> bool:
        """Whether parts wait for the end of a step."""
        return any(outgoing.parts for outgoing in self._requests.values())

    def expect(self, request: Any, reference: str, prompt: Prompt, traceparent: str) -> None:
        """Note that a request that has arrived is to be published, under a router's reference if there is one."""
        outgoing = OutgoingRequest(request, reference, prompt, self._holds.begin(), traceparent, self._step)
        # The prompt of a session grows, and its last tokens are computed again.
        outgoing.closed = not reference or self._block_ids is None or bool(getattr(request, "resumable", False))
        # A sample may come when the first one has ended.
        follows = bool(reference) and (
            reference in self._used or any(other.reference == reference for other in self._requests.values())
        )
        (self._followers if follows else self._requests)[outgoing.request_id] = outgoing

    def prompt(self, request_id: str) -> Prompt:
        """Return the prompt of an expected request, as it arrived; unknown, if it is not expected."""
        outgoing = self._requests.get(request_id) or self._followers.get(request_id)
        return Prompt.unknown if outgoing is None else outgoing.prompt

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """Begin a step in which so many tokens of requests are computed; return its number, from 1."""
        self._step += 1
        for known in (self._requests, self._followers):
            for request_id in scheduled.keys() & known.keys() if known else ():
                outgoing = known[request_id]
                outgoing.step = self._step
                if known is self._requests and not outgoing.closed:
                    self._plan(outgoing, outgoing.request.num_computed_tokens + scheduled[request_id])
        self._withdraw_if_stuck(idle=not scheduled)
        return self._step

    def ended(self, steps: Mapping[int, int]) -> None:
        """Take the last step that has ended on each of some ranks, and publish the parts that were computed until
        then."""
        for rank, step in steps.items():
            self._ended[rank] = max(self._ended[rank], step)
        everywhere = min(self._ended.values())
        for outgoing in self._requests.values():
            while outgoing.parts and outgoing.parts[0].step <= everywhere:
                self._publish(outgoing, outgoing.parts[0].blocks)

    def lost(self, blocks: Iterable[int]) -> None:
        """Handle blocks into which another connector could not load: vLLM computes them again, in place, and all that
        was computed from them.

        With two steps under way, a worker's news may say that a step has ended before its output names such blocks. A
        publication that has them by then is withdrawn.
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
        """Forget a request that has finished, if it is another sample of one that is published; return whether it
        is."""
        return self._followers.pop(request_id, None) is not None

    def take(self, request: Any) -> OutgoingRequest:
        """Return a request that has finished, and forget it."""
        outgoing = self._requests.pop(request.request_id, None)
        if outgoing is None:
            return OutgoingRequest(request, "", Prompt.unknown, self._holds.begin(), step=self._step)
        self._forget_parts(outgoing)
        return outgoing

    def rest(self, outgoing: OutgoingRequest, blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Return what is not published yet of all blocks of a finished request, and hold it."""
        found = {
            table.group.name: table.rest(blocks[table.group.name], outgoing.published.get(table.group.name, 0))
            for table in self._setup.tables
        }
        outgoing.held.add(found)
        return found

    def keep(self, outgoing: OutgoingRequest, publication: Publication) -> bool:
        """Keep what is held of a request until its publication is released, see `Holds.keep`."""
        if outgoing.reference:
            self._used.add(outgoing.reference)
        return self._holds.keep(publication.number, outgoing.held)

    def give_up(self, outgoing: OutgoingRequest, *, decline: bool = True) -> None:
        """Handle that a request ends, and nothing or nothing more of it will be published.

        Args:
            outgoing: as `take` returned it.
            decline: nobody else will publish under its reference.
        """
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
            # Decode waits for it.
            self._port.decline(outgoing.reference)
        except KvferryError as error:
            logger.info("could not decline the reference of request %r: %s", outgoing.request_id, error)

    def released(self, publication: int) -> None:
        """Forget what is held of a publication, which is free again."""
        for outgoing in self._requests.values():
            if outgoing.publication is not None and outgoing.publication.number == publication:
                # Its reader has given up, or died.
                outgoing.held = self._holds.begin()
                self._forget_parts(outgoing)
                outgoing.closed = outgoing.withdrawn = True

    # Internal.

    def _plan(self, outgoing: OutgoingRequest, tokens: int) -> None:
        """Plan to publish what this step completes of a prompt; nothing, if vLLM's blocks are not known."""
        if self._block_ids is None:
            return
        # The last token comes with the end of the request, so that something is left for it.
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
            # From now on, because vLLM may free them before the step has ended.
            outgoing.held.add(blocks)
            outgoing.parts.append(ComputedPart(self._step, blocks))

    def _is_longer(self, outgoing: OutgoingRequest, tokens: int) -> bool:
        """Whether a block of some group is full that was not before."""
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
                self.keep(outgoing, outgoing.publication)
                self._count("published")
            else:
                self._port.publish_more(outgoing.publication, blocks, last=False)
        except KvferryError as error:
            logger.warning("request %r could not be published: %s", outgoing.request_id, error)
            self._forget_parts(outgoing)
            outgoing.closed = True
            # A reference that another publication has is not ours to decline.
            outgoing.withdrawn = isinstance(error, RouterKeyUsed)
            if outgoing.publication is not None:
                self._withdraw(outgoing)
            return
        outgoing.parts.popleft()
        self._sums.append(Summed(outgoing.publication.number, blocks, last=False))
        outgoing.published |= {name: listed.end_token or 0 for name, listed in blocks.items()}

    def _forget_parts(self, outgoing: OutgoingRequest) -> None:
        """Free the blocks of the parts that are not published yet."""
        for part in outgoing.parts:
            outgoing.held.drop(part.blocks)
        outgoing.parts.clear()
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
            for outgoing in (self._requests.values() if idle else ())
            if outgoing.publication is not None
            and not outgoing.withdrawn
            and outgoing.request.status is RequestStatus.PREEMPTED
        ]
        if not preempted:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        elif self._now() - self._idle_since > STUCK:
            self._idle_since = None
            # The youngest: vLLM computes the others before it.
            outgoing = preempted[-1]
            logger.warning(
                "request %r was preempted, and the blocks that are published keep it from being computed again: its "
                "publication is withdrawn",
                outgoing.request_id,
            )
            self._forget_parts(outgoing)
            self._withdraw(outgoing)
