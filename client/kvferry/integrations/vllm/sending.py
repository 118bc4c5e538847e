"""The requests of prefill in vLLM's scheduler: what is published, when, and which blocks are kept for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Prompt, Release, ReleaseOutcome
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError, RouterKeyUsed
from kvferry.integrations.first_token import first_token_payload
from kvferry.integrations.vllm.block_hold import Holds
from kvferry.integrations.vllm.outgoing import BlockIds, OutgoingRequests
from kvferry.integrations.vllm.params import asks_to_publish, publish_reference, published_params, traceparent_of
from kvferry.integrations.vllm.prompts import prompt_of, published_prompt, shorten
from kvferry.integrations.vllm.publishing import ComputedPublishing, OutgoingRequest, Summed
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.siblings import Siblings
from kvferry.integrations.vllm.values import StepsDone

logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Sending:
    """Publishes the requests of prefill.

    A request is published when it has finished, or in parts under the reference that its router made. Its blocks are
    held here until they are released. If vLLM has not given its pool, vLLM keeps them, and steps until then.

    Args:
        setup: the engine.
        port: its port.
        count: counts something by its name, see `KvferryStats`.
    """

    def __init__(self, setup: Setup, port: SchedulerPort, count: Callable[[str], None]) -> None:
        self._setup = setup
        self._port = port
        self._count = count
        self._sums: list[Summed] = []
        self._publishing = ComputedPublishing(port, setup.spec.num_ranks, self._sums, checksums=setup.sums)
        self._holds = Holds()
        self._requests = OutgoingRequests(setup, port, self._holds, count, self._sums)
        self._kept: dict[int, str] = {}
        """Requests whose blocks vLLM keeps until they are released, by the numbers of their publications: a client may
        use a request_id again while blocks are held for it here."""
        self._published = Siblings()
        self._warned = False

    @property
    def waiting(self) -> bool:
        """Whether finished requests are not published yet, because their devices have not computed them."""
        return self._publishing.waiting

    @property
    def unsummed(self) -> bool:
        """Whether published blocks are to be summed in the next step."""
        return self._setup.sums and bool(self._sums)

    @property
    def asks(self) -> bool:
        """Whether the end of a step is waited for."""
        return self._requests.waiting

    @property
    def holding(self) -> bool:
        """Whether blocks are held here."""
        return bool(self._holds)

    def bind(self, pool: Any, block_ids: BlockIds) -> None:
        """Take vLLM's block pool, and what returns the blocks of a request."""
        self._holds.bind(pool)
        self._requests.bind(block_ids)

    def expect(self, request: Any) -> None:
        """Look at a request that has arrived, and shorten its prompt if decode will compute the end of it."""
        if not asks_to_publish(request):
            return
        reference = publish_reference(request)
        if not self._setup.serves:
            self._refuse(reference)
            return
        if request.max_tokens == 1:
            shorten(request, self._setup.withheld)
        self._requests.expect(request, reference, self.prompt(request), traceparent_of(request))

    def prompt(self, request: Any) -> Prompt:
        """Return the prompt of a request that has arrived, which is made once if it is to be published, too."""
        known = self._requests.prompt(request.request_id)
        return known or prompt_of(request, names_inputs=self._setup.names_inputs)

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """Begin a step in which so many tokens of requests are computed; return its number, from 1."""
        return self._requests.begin(scheduled)

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Publish a request that has ended, if decode will read it, or what is left of it.

        Returns:
            Whether vLLM must keep its blocks, and the ``kv_transfer_params`` for the router.
        """
        request_id = request.request_id
        follows, outgoing = self._requests.follows(request_id), self._requests.take(request)
        # The last token was sampled, and its KV cache is not computed yet.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        asked = asks_to_publish(request) and self._setup.serves
        if not asked or request.status not in _SERVED or tokens <= 0:
            return self._not_published(outgoing), None
        sibling = None if outgoing.reference else self._published.find(request, tokens)
        if sibling is not None or follows:
            return self._not_published(outgoing), None if sibling is None else published_params(sibling)
        if self._setup.has_states and self._state_is_elsewhere(request):
            logger.info("request %r is not published: where its last token's state is, is not known", request_id)
            return self._not_published(outgoing), None
        if outgoing.withdrawn:
            return self._not_published(outgoing), None
        try:
            blocks = self._requests.rest(outgoing, self._setup.published(block_ids, tokens))
            prompt = published_prompt(request, outgoing.prompt, tokens, names_inputs=self._setup.names_inputs)
            payload = self._first_token(request, tokens)
            publication = self._publishing.publish(outgoing, blocks, prompt=prompt, payload=payload)
        except KvferryError as error:
            logger.warning("request %r could not be published: %s", request_id, error)
            return self._not_published(outgoing, decline=not isinstance(error, RouterKeyUsed)), None
        if outgoing.publication is None:
            self._count("published")
        self._published.add(request, tokens, publication)
        held = self._requests.keep(outgoing, publication)
        if not held:
            self._kept[publication.number] = request_id
        return not held, published_params(publication)

    def lost(self, blocks: Iterable[int]) -> None:
        """Handle blocks that vLLM was told could not be loaded."""
        self._requests.lost(blocks)

    def computed(self, steps: Mapping[int, StepsDone]) -> None:
        """Take how far the devices of some ranks have come, and publish what was computed."""
        self._publishing.computed({rank: done.computed for rank, done in steps.items()})
        self._requests.ended({rank: done.ended for rank, done in steps.items()})

    def released(self, releases: Iterable[Release]) -> set[str]:
        """Free what was released, or return the requests whose blocks vLLM may free."""
        sent = set()
        for release in releases:
            self._published.released(release.publication)
            self._holds.released(release.publication)
            self._requests.released(release.publication)
            wanted = release.outcome in (ReleaseOutcome.READ, ReleaseOutcome.DECLINED)
            if not wanted:
                self._count("unread")
            if not wanted or any(read.state not in ("valid", "cancelled") for read in release.reads):
                # With the names by which the reader's log calls it.
                logger.warning("engine %s, %s", self._setup.spec.engine_id, release)
            if release.publication in self._kept:
                sent.add(self._kept.pop(release.publication))
        return sent

    def take_sums(self) -> list[Summed]:
        """Return the blocks that were published since the last call: integrity mode sums them."""
        found = self._sums.copy()
        self._sums.clear()
        return found

    # Internal.

    def _refuse(self, reference: str) -> None:
        """Handle that an engine is asked to publish whose caches nobody can read: nothing is kept for anybody."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "engine %s is asked to publish requests, and its role is decode, by kv_role or role: they are not "
                "published. Give role both to engines that others read from, too, such as decode in a conversation",
                self._setup.spec.engine_id,
            )
        if reference:
            try:
                # Its reader waits for it.
                self._port.decline(reference)
            except KvferryError as error:
                logger.info("could not decline a reference: %s", error)

    def _first_token(self, request: Any, tokens: int) -> bytes:
        """Return the payload of a request of which so many tokens are published: the first token of its answer.

        vLLM's decode computes the prompt's last token again, and needs none. Engines that compute nothing of a prompt
        do. What they read must be the whole prompt and nothing else; otherwise the payload is empty.
        """
        whole = tokens == request.num_prompt_tokens and request.num_output_tokens == 1 and not self._setup.withheld
        return first_token_payload(request.all_token_ids[tokens], tokens) if whole else b""

    def _not_published(self, outgoing: OutgoingRequest, *, decline: bool = True) -> bool:
        """Handle that nothing, or nothing more, of a request will be published; return False."""
        self._requests.give_up(outgoing, decline=decline)
        return False

    def _state_is_elsewhere(self, request: Any) -> bool:
        """Whether the state of a request may not be that of its last token but one, in the block that this one has.

        Asynchronous scheduling may have run a step after the last token. Drafts leave states in blocks of their own,
        and which of them were accepted only the device knows.
        """
        drafted = self._setup.drafts_states and request.num_output_tokens > 1
        return drafted or bool(request.num_computed_tokens != request.num_tokens - 1)
