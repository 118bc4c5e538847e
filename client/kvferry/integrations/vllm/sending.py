"""The publications of vLLM's scheduler, requests of prefill and answers to questions: holds their blocks until the
release."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import MissReason, Prompt, Publication, Question, Release, ReleaseOutcome
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError, PromptMismatch, RouterKeyUsed
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.first_token import first_token_payload
from kvferry.integrations.remembered import remember
from kvferry.integrations.vllm.cached import Hit, PrefixCache
from kvferry.integrations.vllm.outgoing import BlockHolds, ComputedPart, OutgoingRequest, contents_of, ids_of
from kvferry.integrations.vllm.requests import (
    asks_to_publish,
    prompt_of,
    publish_reference,
    published_params,
    published_prompt,
    shorten,
    traceparent_of,
)
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import StepsDone, Summed

logger = logging.getLogger(__name__)

STUCK = 2.0
"""Seconds without any computing until a preempted request's publication, which holds memory, is withdrawn."""

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Sending:
    """Publishes the requests of prefill, and holds their blocks until the release.

    A request is published when it has finished; a request with a router's reference in parts, while its prompt is
    computed. A part is the full blocks that a step of vLLM has completed in groups that keep all tokens; the rest
    follows at the end of the request: the last block, windows, states. Parts have only tokens of the prompt, because
    vLLM may sample other tokens again, and no block that a drafter may still write to, which vLLM does not take for its
    prefix cache either.

    Blocks are published when every rank's device has computed their step, for the reasons in
    `kvferry.integrations.vllm.worker`; parts also wait until vLLM has ended the step, which it has when it finishes a
    request.

    vLLM frees the blocks of a request that it preempts, and computes the request again, in other blocks if the old ones
    are no longer in its prefix cache. The publication keeps its blocks, and goes on with the new blocks of later
    tokens. If publications hold so much memory that vLLM can compute nothing, the publication of a preempted request is
    withdrawn.

    The blocks of an answer are held as a request would hold them. vLLM takes blocks for its prefix cache when it
    schedules the step that computes them, so an answer is published when that step has ended on every rank.

    `sums` gets the published blocks that integrity mode sums; `count` adds to a count by its name, see `KvferryStats`.
    """

    def __init__(
        self,
        setup: Setup,
        port: SchedulerPort,
        cache: PrefixCache,
        sums: list[Summed],
        count: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._port = port
        self._cache = cache
        self._sums = sums
        self._count = count
        self._now = time.monotonic
        self._holds = BlockHolds(cache.pool)
        self._answer_holds = BlockHolds(cache.pool)  # those of answers, which have a share of the pool
        self._step = 0
        self._ranks = dict.fromkeys(range(setup.spec.num_ranks), StepsDone(0, 0))
        self._everywhere = StepsDone(0, 0)  # the progress of the slowest rank
        self._requests: dict[str, OutgoingRequest] = {}  # that have not finished
        self._unpublished: dict[OutgoingRequest, None] = {}  # that have parts: a step costs nothing for the others
        self._published: dict[int, OutgoingRequest] = {}
        """By the numbers of their publications, until the release: a client may use a request_id again before."""
        self._used: dict[str, None] = {}
        """References of publications. A sample that comes after its reference was forgotten is refused."""
        self._samples: dict[str, OutgoingRequest] = {}
        """Those of `_published` that are samples and have finished, by their parents, see `_of_sample`."""
        self._idle_since: float | None = None
        self._warned = False

    @property
    def waiting(self) -> bool:
        """Whether blocks are unpublished, because some device has not computed them, or vLLM has not ended a step."""
        return bool(self._unpublished)

    @property
    def holding(self) -> bool:
        return bool(self._published)

    def expect(self, request: Any) -> None:
        """Add an arrived request if it is to be published, and shorten its prompt if decode will compute the end of the
        prompt."""
        if not asks_to_publish(request):
            return
        reference = publish_reference(request)
        if not self._setup.serves:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "engine %s is asked to publish requests, and its role is decode, by kv_role or role: they are not "
                    "published. Give role both to engines that others read from, too, such as decode in a conversation",
                    self._setup.spec.engine_id,
                )
            if reference:
                # Decode waits for the publication.
                decline(self._port, reference)
            return
        if request.max_tokens == 1:
            shorten(request, self._setup.withheld)
        outgoing = OutgoingRequest(
            str(request.request_id), request, reference, self.prompt(request), self._holds, self._step
        )
        # The prompt of a session grows, and its last tokens are computed again.
        outgoing.closed = not reference or request.resumable
        # A sample may come when the first sample has ended.
        outgoing.follows = bool(reference) and (
            reference in self._used
            or any(other.reference == reference and not other.follows for other in self._requests.values())
        )
        self._requests[outgoing.request_id] = outgoing

    def prompt(self, request: Any) -> Prompt:
        """Return the prompt of an arrived request; a request that is also published has one `Prompt` object."""
        outgoing = self._requests.get(request.request_id)
        known = Prompt.unknown if outgoing is None else outgoing.prompt
        return known or prompt_of(request, names_inputs=self._setup.names_inputs)

    def answer(self, question: Question, hit: Hit, most: int) -> bool:
        """Hold the blocks that answer a question, and publish them as soon as they are computed; return False if
        answers would hold more than `most` blocks."""
        if self._answer_holds.with_more(ids_of(hit.blocks)) > most:
            return False
        name, holds = f"prefix-{question.number}", self._answer_holds
        answer = OutgoingRequest(name, None, question.reference, question.prompt, holds, self._step)
        answer.question, answer.computed_from = question, hit.computed_from
        answer.hold(hit.blocks)
        answer.parts.append(ComputedPart(self._step, hit.blocks))
        self._unpublished[answer] = None
        self.computed({})
        return True

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """Begin a step, with the number of computed tokens by request; return the step's number, from 1."""
        self._step += 1
        for request_id in scheduled if self._requests else ():
            outgoing = self._requests.get(request_id)
            if outgoing is not None:
                outgoing.step = self._step
                if not (outgoing.closed or outgoing.follows):
                    request = outgoing.request
                    computed = request.num_computed_tokens + scheduled[request_id] - self._setup.rewritten
                    # The last token is left for the end of the request, which must publish at least one block.
                    tokens = min(computed, request.num_prompt_tokens - 1)
                    outgoing.plan(self._setup.tables, self._cache.block_ids, tokens)
                    if outgoing.parts:
                        self._unpublished[outgoing] = None
        self._withdraw_if_stuck(idle=not scheduled)
        return self._step

    def computed(self, steps: Mapping[int, StepsDone]) -> None:
        """Take the progress of some ranks' devices, and publish the blocks that every rank has computed."""
        for rank, done in steps.items():
            known = self._ranks[rank]
            self._ranks[rank] = StepsDone(max(known.computed, done.computed), max(known.ended, done.ended))
        ranks = self._ranks.values()
        self._everywhere = StepsDone(min(done.computed for done in ranks), min(done.ended for done in ranks))
        for outgoing in list(self._unpublished):
            step = self._everywhere.computed if outgoing.finished else self._everywhere.ended
            question = outgoing.question
            if question is not None and not question.open:
                self._forget_parts(outgoing)
            try:
                while outgoing.parts and outgoing.parts[0].step <= step:
                    last = outgoing.finished or question is not None
                    self._publish(outgoing, outgoing.parts[0].blocks, last=last)
                    outgoing.parts.popleft()
            except KvferryError as error:
                self._refused(outgoing, error)
            if not outgoing.parts:
                self._unpublished.pop(outgoing, None)

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
            if not bad.isdisjoint(outgoing.held) and not outgoing.withdrawn:
                logger.warning("request %r: blocks that are published could not be loaded", outgoing.request_id)
                self._withdraw(outgoing)
        for answer in [*self._unpublished, *self._published.values()]:
            if answer.question is not None and bad & answer.computed_from:
                if answer.publication is None:
                    self._port.miss(answer.question, MissReason.NOT_CACHED)
                self._withdraw(answer)

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Publish an ended request, or the rest of it, if decode will read it. Return the ``kv_transfer_params`` for
        the router."""
        outgoing = self._requests.pop(request.request_id, None)
        if outgoing is None:
            outgoing = OutgoingRequest(str(request.request_id), request, "", Prompt.unknown, self._holds, self._step)
        self._forget_parts(outgoing)
        # The last token was only sampled: its KV cache is not computed yet.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        publication = None
        if asks_to_publish(request) and self._setup.serves and request.status in _SERVED and tokens > 0:
            if outgoing.follows or not outgoing.reference:
                publication = self._of_sample(outgoing, tokens)
            if publication is None:
                publication = self._publish_rest(outgoing, block_ids, tokens)
        outgoing.request = None
        if publication is not None:
            return published_params(publication)
        self._give_up(outgoing)
        return None

    def released(self, releases: Iterable[Release]) -> None:
        """Free the blocks of released publications."""
        for release in releases:
            outgoing = self._published.pop(release.publication, None)
            if outgoing is not None:
                if self._samples.get(outgoing.parent) is outgoing:
                    del self._samples[outgoing.parent]
                # Where it is not complete, the reader has given up, or died.
                self._forget_parts(outgoing)
                outgoing.closed = outgoing.withdrawn = True
                outgoing.free()
                if outgoing.question is not None:
                    continue
            wanted = release.outcome in (ReleaseOutcome.READ, ReleaseOutcome.DECLINED)
            if not wanted:
                self._count("unread")
            if not wanted or any(read.state not in ("valid", "cancelled") for read in release.reads):
                # With the names in the reader's log.
                logger.warning("engine %s, %s", self._setup.spec.engine_id, release)

    # Internal.

    def _publish_rest(
        self, outgoing: OutgoingRequest, block_ids: tuple[list[int], ...], tokens: int
    ) -> Publication | None:
        """Publish the unpublished blocks of a request that has finished, as soon as they are computed; return None if
        that is impossible."""
        request = outgoing.request
        if outgoing.follows or outgoing.withdrawn:
            return None
        # Asynchronous scheduling may have run a step more, and only the device knows the accepted drafts' blocks.
        if self._setup.has_states and (
            request.num_computed_tokens != request.num_tokens - 1
            or (self._setup.drafts_states and request.num_output_tokens > 1)
        ):
            logger.info(
                "request %r is not published: the block of its last token's state is unknown", request.request_id
            )
            return None
        try:
            blocks = outgoing.rest(self._setup.tables, self._setup.published(block_ids, tokens))
            outgoing.finished = True
            outgoing.prompt = published_prompt(request, outgoing.prompt, tokens, names_inputs=self._setup.names_inputs)
            if tokens == request.num_prompt_tokens and request.num_output_tokens == 1 and not self._setup.withheld:
                # The first token of the answer, for engines that compute no token of a prompt. vLLM's decode computes
                # the prompt's last token again, and does not need it.
                outgoing.payload = first_token_payload(request.all_token_ids[tokens], tokens)
            if outgoing.step <= self._everywhere.computed:
                publication = self._publish(outgoing, blocks, last=True)
            else:
                # vLLM needs the reference now. The reader waits for the blocks, which costs one message more.
                publication = outgoing.publication or self._publish(outgoing, {}, last=False)
                outgoing.parts.append(ComputedPart(outgoing.step, blocks))
                self._unpublished[outgoing] = None
        except KvferryError as error:
            self._refused(outgoing, error)
            return None
        if outgoing.parent and (contents := contents_of(request, tokens)) is not None:
            outgoing.contents = contents
            self._samples[outgoing.parent] = outgoing
        return publication

    def _of_sample(self, outgoing: OutgoingRequest, tokens: int) -> Publication | None:
        """Return the publication of another sample of the same prompt with the same tokens; None: there is none. vLLM
        returns the ``kv_transfer_params`` of only the sample that ends last, so publications of the others would have
        no reader, and stay pinned for the whole hold."""
        other = self._samples.get(outgoing.parent)
        if other is None or other.request_id == outgoing.request_id:
            return None
        # Clients can choose request_ids of this form, so the contents are compared, too.
        return other.publication if other.contents == contents_of(outgoing.request, tokens) else None

    def _publish(self, outgoing: OutgoingRequest, blocks: Mapping[str, Blocks], *, last: bool) -> Publication:
        """Publish blocks of a request, with the payload if they are the `last`. Errors as `SchedulerPort.publish` and
        `SchedulerPort.publish_more`."""
        publication, payload = outgoing.publication, outgoing.payload if last else b""
        if publication is not None:
            # The marks of the prompt went with the first blocks; those of the answer go with the last.
            prompt = outgoing.prompt if last else Prompt.unknown
            self._port.publish_more(publication, blocks, last=last, payload=payload, prompt=prompt)
        else:
            publication = outgoing.publication = self._port.publish(
                outgoing.request_id,
                blocks,
                last=last,
                payload=payload,
                checksums=self._setup.sums,
                traceparent="" if outgoing.request is None else traceparent_of(outgoing.request),
                reference=outgoing.reference,
                prompt=outgoing.prompt,
            )
            self._count("published" if outgoing.question is None else "prefixes_published")
            if outgoing.reference and outgoing.question is None:
                remember(self._used, outgoing.reference, None)
            self._published[publication.number] = outgoing
        if self._setup.sums and blocks:
            self._sums.append(Summed(publication.number, blocks, last))
        return publication

    def _refused(self, outgoing: OutgoingRequest, error: KvferryError) -> None:
        """Handle an error of `_publish`. A publication is withdrawn, since nobody can read it any more."""
        level = logging.WARNING if outgoing.question is None else logging.INFO
        logger.log(level, "request %r could not be published: %s", outgoing.request_id, error)
        outgoing.closed = True
        # The reference of another publication must not be declined.
        outgoing.withdrawn = isinstance(error, RouterKeyUsed)
        self._withdraw(outgoing)

    def _give_up(self, outgoing: OutgoingRequest) -> None:
        """Handle an ended request of which no more blocks will be published."""
        if outgoing.publication is not None:
            if not outgoing.withdrawn:
                self._withdraw(outgoing)
            return
        outgoing.free()
        if outgoing.withdrawn or outgoing.follows or not outgoing.reference:
            return
        for other in self._requests.values():
            if other.follows and other.reference == outgoing.reference:
                other.follows = False
                return
        decline(self._port, outgoing.reference)

    def _forget_parts(self, outgoing: OutgoingRequest) -> None:
        outgoing.forget_parts()
        self._unpublished.pop(outgoing, None)

    def _withdraw(self, outgoing: OutgoingRequest) -> None:
        """Publish no more of a request, and withdraw what is published."""
        self._forget_parts(outgoing)
        if outgoing.publication is None:
            return
        outgoing.closed = outgoing.withdrawn = True
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
            # The last that came, because vLLM computes the others first.
            outgoing = preempted[-1]
            logger.warning(
                "request %r was preempted, and the blocks that are published keep it from being computed again: its "
                "publication is withdrawn",
                outgoing.request_id,
            )
            self._withdraw(outgoing)


def decline(port: SchedulerPort, reference: str, prompt: Prompt = Prompt.unknown) -> KvferryError | None:
    """Decline a publication, or a reference that a router has made for one; return the error, if any."""
    try:
        port.decline(reference, prompt=prompt)
    except KvferryError as error:
        level = logging.WARNING if isinstance(error, PromptMismatch) else logging.INFO
        logger.log(level, "did not decline a publication: %s", error)
        return error
    return None
