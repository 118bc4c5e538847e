"""Requests that prefill publishes under references that routers made: each prompt in parts, while it is computed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from kvferry import Prompt, Publication
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError, RouterKeyUsed
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.vllm.block_hold import BlockHold, Holds, ids_of
from kvferry.integrations.vllm.publishing import Summed
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


class _Part(NamedTuple):
    """Blocks that may be published when `step` has ended."""

    step: int
    blocks: Mapping[str, Blocks]


@dataclass(slots=True, eq=False)
class Routed:
    """A request that will be published under a router's reference.

    Attributes:
        request: vLLM's request.
        reference: the router's reference.
        prompt: its prompt.
        held: the blocks that are published or will be soon.
        traceparent: of the trace that it belongs to; empty: none.
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
    publication: Publication | None = None
    parts: deque[_Part] = field(default_factory=deque)
    published: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    withdrawn: bool = False

    @property
    def request_id(self) -> str:
        """vLLM's request_id."""
        return str(self.request.request_id)


class RoutedPublishing:
    """Publishes the parts of prompts, and holds their blocks until they are released.

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
        self._block_ids: BlockIds | None = None
        self._requests: dict[str, Routed] = {}
        """Those that are published under their reference, each by its request_id, until they finish."""
        self._followers: dict[str, Routed] = {}
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
        return any(routed.parts for routed in self._requests.values())

    def expect(self, request: Any, reference: str, prompt: Prompt, traceparent: str) -> None:
        """Note that a request that has arrived is to be published under a router's reference."""
        routed = Routed(request, reference, prompt, self._holds.begin(), traceparent)
        # The prompt of a session grows, and its last tokens are computed again.
        routed.closed = self._block_ids is None or bool(getattr(request, "resumable", False))
        # A sample may come when the first one has ended.
        others = reference in self._used or any(other.reference == reference for other in self._requests.values())
        (self._followers if others else self._requests)[routed.request_id] = routed

    def begin(self, step: int, scheduled: Mapping[str, int]) -> None:
        """Begin a step.

        Args:
            step: its number.
            scheduled: how many tokens of each request are computed in it.
        """
        for request_id in scheduled.keys() & self._requests.keys() if self._requests else ():
            routed = self._requests[request_id]
            if not routed.closed:
                self._plan(routed, step, routed.request.num_computed_tokens + scheduled[request_id])
        self._withdraw_if_stuck(idle=not scheduled)

    def ended(self, steps: Mapping[int, int]) -> None:
        """Take the last step that has ended on each of some ranks, and publish the parts that were computed until
        then."""
        for rank, step in steps.items():
            self._ended[rank] = max(self._ended[rank], step)
        everywhere = min(self._ended.values())
        for routed in self._requests.values():
            while routed.parts and routed.parts[0].step <= everywhere:
                self._publish(routed, routed.parts[0].blocks)

    def lost(self, blocks: Iterable[int]) -> None:
        """Handle blocks into which another connector could not load: vLLM computes them again, in place, and all that
        was computed from them.

        With two steps under way, a worker's news may say that a step has ended before its output names such blocks. A
        publication that has them by then is withdrawn.
        """
        bad = set(blocks)
        for routed in self._requests.values():
            if any(not bad.isdisjoint(ids_of(part.blocks)) for part in routed.parts):
                self._forget_parts(routed)
                routed.closed = True
            if routed.held.any_of(bad) and not routed.withdrawn:
                logger.warning("request %r: blocks that are published could not be loaded", routed.request_id)
                self._forget_parts(routed)
                self._withdraw(routed)

    def follows(self, request_id: str) -> bool:
        """Forget a request that has finished, if it is another sample of one that is published; return whether it
        is."""
        return self._followers.pop(request_id, None) is not None

    def take(self, request_id: str) -> Routed | None:
        """Return a request that has finished, and forget it; None: no router has made a reference for it."""
        routed = self._requests.pop(request_id, None)
        if routed is not None:
            self._forget_parts(routed)
        return routed

    def rest(self, routed: Routed, blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Return what is not published yet of all blocks of a finished request, and hold it."""
        found = {
            table.group.name: table.rest(blocks[table.group.name], routed.published.get(table.group.name, 0))
            for table in self._setup.tables
        }
        routed.held.add(found)
        return found

    def keep(self, routed: Routed, publication: Publication) -> bool:
        """Keep what is held of a request until its publication is released, see `Holds.keep`."""
        self._used.add(routed.reference)
        return self._holds.keep(publication.number, routed.held)

    def give_up(self, routed: Routed, *, decline: bool = True) -> None:
        """Handle that a request ends, and nothing or nothing more of it will be published.

        Args:
            routed: as `take` returned it.
            decline: nobody else will publish under its reference.
        """
        if routed.publication is not None:
            if not routed.withdrawn:
                self._withdraw(routed)
            return
        routed.held.free()
        if routed.withdrawn or not decline:
            return
        for request_id, follower in self._followers.items():
            if follower.reference == routed.reference:
                self._requests[request_id] = self._followers.pop(request_id)
                return
        try:
            # Decode waits for it.
            self._port.decline(routed.reference)
        except KvferryError as error:
            logger.info("could not decline the reference of request %r: %s", routed.request_id, error)

    def released(self, publication: int) -> None:
        """Forget what is held of a publication, which is free again."""
        for routed in self._requests.values():
            if routed.publication is not None and routed.publication.number == publication:
                # Its reader has given up, or died.
                routed.held = self._holds.begin()
                self._forget_parts(routed)
                routed.closed = routed.withdrawn = True

    # Internal.

    def _plan(self, routed: Routed, step: int, tokens: int) -> None:
        """Plan to publish what a step completes of a prompt; nothing, if vLLM's blocks are not known."""
        if self._block_ids is None:
            return
        # The last token comes with the end of the request, so that something is left for it.
        tokens = min(tokens - self._setup.rewritten, routed.request.num_prompt_tokens - 1)
        if not self._is_longer(routed, tokens):
            return
        ids = self._block_ids(routed.request_id)
        blocks = {}
        for table in self._setup.tables:
            name = table.group.name
            found = table.early(ids[table.index], routed.planned.get(name, 0), tokens)
            if len(found.ids):
                blocks[name] = found
                routed.planned[name] = found.end_token or 0
        if blocks:
            # From now on, because vLLM may free them before the step has ended.
            routed.held.add(blocks)
            routed.parts.append(_Part(step, blocks))

    def _is_longer(self, routed: Routed, tokens: int) -> bool:
        """Whether a block of some group is full that was not before."""
        return any(
            tokens // table.entry_tokens * table.entry_tokens > routed.planned.get(table.group.name, 0)
            for table in self._setup.tables
            if not table.forgets
        )

    def _publish(self, routed: Routed, blocks: Mapping[str, Blocks]) -> None:
        try:
            if routed.publication is None:
                routed.publication = self._port.publish(
                    routed.request_id,
                    blocks,
                    last=False,
                    checksums=self._setup.sums,
                    traceparent=routed.traceparent,
                    reference=routed.reference,
                    prompt=routed.prompt,
                )
                self.keep(routed, routed.publication)
                self._count("published")
            else:
                self._port.publish_more(routed.publication, blocks, last=False)
        except KvferryError as error:
            logger.warning("request %r could not be published: %s", routed.request_id, error)
            self._forget_parts(routed)
            routed.closed = True
            # A reference that another publication has is not ours to decline.
            routed.withdrawn = isinstance(error, RouterKeyUsed)
            if routed.publication is not None:
                self._withdraw(routed)
            return
        routed.parts.popleft()
        self._sums.append(Summed(routed.publication.number, blocks, last=False))
        routed.published |= {name: listed.end_token or 0 for name, listed in blocks.items()}

    def _forget_parts(self, routed: Routed) -> None:
        """Free the blocks of the parts that are not published yet."""
        for part in routed.parts:
            routed.held.drop(part.blocks)
        routed.parts.clear()
        routed.planned = dict(routed.published)

    def _withdraw(self, routed: Routed) -> None:
        routed.closed = routed.withdrawn = True
        if routed.publication is None:
            return
        try:
            self._port.abort(routed.publication)
        except KvferryError as error:
            logger.info("could not withdraw the publication of request %r: %s", routed.request_id, error)

    def _withdraw_if_stuck(self, *, idle: bool) -> None:
        """Withdraw a publication of a preempted request if nothing has been computed for long."""
        preempted = [
            routed
            for routed in (self._requests.values() if idle else ())
            if routed.publication is not None
            and not routed.withdrawn
            and routed.request.status is RequestStatus.PREEMPTED
        ]
        if not preempted:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        elif self._now() - self._idle_since > STUCK:
            self._idle_since = None
            # The youngest: vLLM computes the others before it.
            routed = preempted[-1]
            logger.warning(
                "request %r was preempted, and the blocks that are published keep it from being computed again: its "
                "publication is withdrawn",
                routed.request_id,
            )
            self._forget_parts(routed)
            self._withdraw(routed)
