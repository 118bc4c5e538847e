"""The requests of prefill in vLLM's scheduler: publishes them, and keeps their blocks until the release."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from kvferry import Prompt, Publication, Release, ReleaseOutcome
from kvferry.engine import SchedulerPort
from kvferry.errors import KvferryError, RouterKeyUsed
from kvferry.integrations.first_token import first_token_payload
from kvferry.integrations.vllm.block_hold import Holds
from kvferry.integrations.vllm.outgoing import BlockIds, OutgoingRequests
from kvferry.integrations.vllm.params import asks_to_publish, publish_reference, published_params, traceparent_of
from kvferry.integrations.vllm.prompts import prompt_of, published_prompt, shorten
from kvferry.integrations.vllm.publishing import ComputedPublishing, OutgoingRequest, Summed
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import StepsDone

logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's request_id of a sample: index and request_id of the parent (vllm/v1/engine/parallel_sampling.py,
`ParentRequest.get_child_info`; 0.32.0)."""


class Sending:
    """Publishes the requests of prefill.

    A request is published when it has finished, or in parts under its router's reference. The blocks are held here
    until the release. Without vLLM's pool, vLLM keeps the blocks, and runs steps, until the release.

    Args:
        setup: the engine.
        port: the engine's port.
        count: adds to a count by its name, see `KvferryStats`.
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
        """Requests whose blocks vLLM keeps until the release, by the numbers of their publications: a client may use a
        request_id again while blocks are held for the first request."""
        self._published = Siblings()
        self._warned = False

    @property
    def waiting(self) -> bool:
        """Whether finished requests are unpublished, because some device has not computed them."""
        return self._publishing.waiting

    @property
    def unsummed(self) -> bool:
        """Whether the next step has published blocks to sum."""
        return self._setup.sums and bool(self._sums)

    @property
    def asks(self) -> bool:
        """Whether parts of a prompt wait for the end of a step."""
        return self._requests.waiting

    @property
    def holding(self) -> bool:
        return bool(self._holds)

    def bind(self, pool: Any, block_ids: BlockIds) -> None:
        """See `Holds.bind` and `OutgoingRequests.bind`."""
        self._holds.bind(pool)
        self._requests.bind(block_ids)

    def expect(self, request: Any) -> None:
        """Add an arrived request if it is to be published, and shorten its prompt if decode will compute the end of the
        prompt."""
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
        """Return the prompt of an arrived request; a request that is also published has one `Prompt` object."""
        known = self._requests.prompt(request.request_id)
        return known or prompt_of(request, names_inputs=self._setup.names_inputs)

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """See `OutgoingRequests.begin`."""
        return self._requests.begin(scheduled)

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Publish an ended request, or the rest of it, if decode will read it. Return whether vLLM must keep the
        blocks, and the ``kv_transfer_params`` for the router."""
        request_id = request.request_id
        follows, outgoing = self._requests.follows(request_id), self._requests.take(request)
        # The last token was only sampled: its KV cache is not computed yet.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        asked = asks_to_publish(request) and self._setup.serves
        if not asked or request.status not in _SERVED or tokens <= 0:
            return self._not_published(outgoing), None
        sibling = None if outgoing.reference else self._published.find(request, tokens)
        if sibling is not None or follows:
            return self._not_published(outgoing), None if sibling is None else published_params(sibling)
        if self._setup.has_states and self._state_is_elsewhere(request):
            logger.info("request %r is not published: the block of its last token's state is unknown", request_id)
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
        """See `OutgoingRequests.lost`."""
        self._requests.lost(blocks)

    def computed(self, steps: Mapping[int, StepsDone]) -> None:
        """Take the progress of some ranks' devices, and publish computed blocks."""
        self._publishing.computed({rank: done.computed for rank, done in steps.items()})
        self._requests.ended({rank: done.ended for rank, done in steps.items()})

    def released(self, releases: Iterable[Release]) -> set[str]:
        """Free the blocks of released publications, or return the requests whose blocks vLLM may free."""
        sent = set()
        for release in releases:
            self._published.released(release.publication)
            self._holds.released(release.publication)
            self._requests.released(release.publication)
            wanted = release.outcome in (ReleaseOutcome.READ, ReleaseOutcome.DECLINED)
            if not wanted:
                self._count("unread")
            if not wanted or any(read.state not in ("valid", "cancelled") for read in release.reads):
                # With the names in the reader's log.
                logger.warning("engine %s, %s", self._setup.spec.engine_id, release)
            if release.publication in self._kept:
                sent.add(self._kept.pop(release.publication))
        return sent

    def take_sums(self) -> list[Summed]:
        """Return the blocks that were published since the last call, for integrity mode."""
        found = self._sums.copy()
        self._sums.clear()
        return found

    # Internal.

    def _refuse(self, reference: str) -> None:
        """Decline a request to publish at an engine whose caches cannot be read."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "engine %s is asked to publish requests, and its role is decode, by kv_role or role: they are not "
                "published. Give role both to engines that others read from, too, such as decode in a conversation",
                self._setup.spec.engine_id,
            )
        if reference:
            try:
                # A reader waits for the publication.
                self._port.decline(reference)
            except KvferryError as error:
                logger.info("could not decline a reference: %s", error)

    def _first_token(self, request: Any, tokens: int) -> bytes:
        """Return the payload of a request of which `tokens` tokens are published: the first token of the answer.

        Engines that compute no token of a prompt need the payload; vLLM's decode computes the prompt's last token
        again, and does not. The payload is empty unless exactly the whole prompt is published.
        """
        whole = tokens == request.num_prompt_tokens and request.num_output_tokens == 1 and not self._setup.withheld
        return first_token_payload(request.all_token_ids[tokens], tokens) if whole else b""

    def _not_published(self, outgoing: OutgoingRequest, *, decline: bool = True) -> bool:
        """See `OutgoingRequests.give_up`; return False."""
        self._requests.give_up(outgoing, decline=decline)
        return False

    def _state_is_elsewhere(self, request: Any) -> bool:
        """Whether the block of the last token but one may have another state, or its state may be in another block.

        Asynchronous scheduling may have run a step after the last token. Drafts leave states in blocks of their own,
        and only the device knows the accepted drafts.
        """
        drafted = self._setup.drafts_states and request.num_output_tokens > 1
        return drafted or bool(request.num_computed_tokens != request.num_tokens - 1)


class _Known(NamedTuple):
    contents: tuple[object, ...]
    published: Publication


class Siblings:
    """The unreleased publications of the samples of one prompt (n > 1), which vLLM runs each as its own request.

    The samples share a publication: vLLM returns the ``kv_transfer_params`` of only the sample that ends last, so
    publications of the other samples would have no reader, and stay pinned for the whole hold.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._parents: dict[int, str] = {}
        """The parent of each publication that was added, by its number."""

    def add(self, request: Any, tokens: int, published: Publication) -> None:
        """Remember the publication of the first `tokens` tokens of a request, if the request is a sample."""
        parent = _CHILD.fullmatch(request.request_id)
        if parent is not None and (contents := _contents(request, tokens)) is not None:
            self._known[parent[1]] = _Known(contents, published)
            self._parents[published.number] = parent[1]

    def find(self, request: Any, tokens: int) -> Publication | None:
        """Return the publication of a sibling with the same tokens; None: there is none."""
        parent = _CHILD.fullmatch(request.request_id)
        known = None if parent is None else self._known.get(parent[1])
        if known is None or known.published.request_id == request.request_id:
            return None
        # Clients can choose request_ids of this form, so the contents are compared, too.
        return known.published if known.contents == _contents(request, tokens) else None

    def released(self, number: int) -> None:
        parent = self._parents.pop(number, "")
        known = self._known.get(parent)
        # A request_id may be used again while the publication of the first request is held.
        if known is not None and known.published.number == number:
            del self._known[parent]


def _contents(request: Any, tokens: int) -> tuple[object, ...] | None:
    """Return everything that the cache of the first `tokens` tokens depends on; None: the request does not show it."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    return (
        tuple(request.all_token_ids[:tokens]),
        request.cache_salt,
        None if adapter is None else (adapter.lora_int_id, adapter.lora_name),
    )
