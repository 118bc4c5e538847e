"""vLLM's prefix cache: looks up prompts in it, and answers the questions of other engines for the KV of their
beginnings."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from kvferry import MissReason, Prompt, Question
from kvferry.engine import SchedulerPort
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.integrations.remembered import remember
from kvferry.integrations.vllm.setup import Setup

CHUNK = 2048
"""Tokens that are hashed at a time, at least a block. Hashing ends with the first chunk that is not cached to its end:
most questions are about prompts that are not, and hashes take longer than anything else here."""

MOST_HASHED = 8192
"""Tokens after which a step leaves further questions to the next one."""

LEAST_COST = 256
"""Tokens for which a question counts at least."""


@dataclass(slots=True)
class Lookup:
    """A prompt of another engine, with what vLLM's block hasher reads of a ``Request`` (``get_request_block_hasher``
    in vllm/v1/core/kv_cache_utils.py; 0.32.0)."""

    all_token_ids: array[int]
    mm_features: list[Any]
    lora_request: Any
    num_tokens: int = 0  # the first so many tokens are hashed
    block_hashes: list[Any] = field(default_factory=list)
    cache_salt: None = None
    prompt_embeds: None = None
    known: bool = False  # all tokens are hashed that may be cached


class Hit(NamedTuple):
    """Cached blocks of a prompt, by group; and all block ids that they were computed from, their own among them."""

    blocks: Mapping[str, Blocks]
    computed_from: frozenset[int]


class PrefixCache:
    """vLLM's prefix cache, with the hashes of this engine, by vLLM's ``KVCacheManager``
    (``vllm/v1/core/kv_cache_manager.py``; 0.32.0)."""

    def __init__(self, setup: Setup, manager: Any) -> None:
        self._setup = setup
        self._manager = manager
        self.pool = manager.block_pool
        self._coordinator = manager.coordinator
        self._hash = get_request_block_hasher(self.pool.hash_block_size, get_hash_fn_by_name(setup.hash_algorithm))
        # Every group's blocks end where a chunk ends.
        self._block = int(self._coordinator.scheduler_block_size)
        self._chunk = max(1, CHUNK // self._block) * self._block
        self._whole = [table.index for table in setup.tables if not table.forgets][:1]
        """A group that keeps all tokens, if there is one: without its block there is no hit."""
        self._adapters: dict[str, Any] = {}
        """vLLM's LoRA adapters by name. The prompts of one that was forgotten are not looked up."""

    def see(self, request: Any) -> None:
        """Remember the LoRA adapter of an arrived request, of which the hashes include vLLM's path."""
        adapter = request.lora_request
        if adapter is not None:
            remember(self._adapters, adapter.lora_name, adapter)

    def block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """Return the ids of a running request's blocks, by vLLM's groups."""
        found: tuple[list[int], ...] = self._manager.get_block_ids(request_id)
        return found

    def own(self, request: Any) -> int:
        """Return the number of cached tokens of an arrived request."""
        return int(self._coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])

    def free(self, request: Any) -> None:
        """Free the blocks of a request that vLLM will look up, and compute, anew."""
        self._manager.free(request)

    def lookup(self, prompt: Prompt) -> Lookup | None:
        """Begin to look up a prompt; None: vLLM's hashes of such prompts are not known here, because no request of its
        adapter has come, or vLLM numbers its inputs."""
        adapter = self._adapters.get(prompt.adapter)
        if (prompt.adapter and adapter is None) or (prompt.inputs and not self._setup.names_inputs):
            return None
        inputs = [
            SimpleNamespace(identifier=each.identifier, mm_position=PlaceholderRange(each.offset, each.length))
            for each in prompt.inputs
        ]
        # vLLM's hashes are of Python's own numbers, which an array makes of what is hashed.
        token_ids = array("I")
        token_ids.frombytes(prompt.token_ids.astype("=u4").tobytes())
        return Lookup(token_ids, inputs, adapter)

    def hash(self, lookup: Lookup) -> int:
        """Hash the next chunk of a prompt; return its number of tokens."""
        begin, total = lookup.num_tokens, len(lookup.all_token_ids)
        lookup.num_tokens = min(begin + self._chunk, total)
        lookup.block_hashes += self._hash(lookup)
        lookup.known = lookup.num_tokens == total or bool(
            self._whole and self.pool.get_cached_block(lookup.block_hashes[-1], self._whole) is None
        )
        return lookup.num_tokens - begin

    def find(self, lookup: Lookup, first_token: int) -> Hit | None:
        """Return the cached blocks of a prompt from the block with `first_token` on, by group, of as many tokens as all
        groups have; None: there are none behind `first_token`."""
        hashed = len(lookup.block_hashes) * self.pool.hash_block_size
        # vLLM raises for negative numbers, and a prompt may be shorter than what askers compute themselves.
        most = max(0, min(hashed, len(lookup.all_token_ids) - self._setup.withheld))
        while True:
            hit, tokens = self._coordinator.find_longest_cache_hit(lookup.block_hashes, most)[:2]
            if not tokens % self._block:
                break
            # A part of a block, of which vLLM makes copies in its steps.
            most = tokens - tokens % self._block
        if tokens <= first_token:
            return None
        ids = tuple([block.block_id for block in blocks] for blocks in hit)
        try:
            blocks = self._setup.published(ids, tokens)
        except InvalidField:
            return None
        wanted = {
            table.group.name: table.rest(
                blocks[table.group.name], first_token // table.entry_tokens * table.entry_tokens
            )
            for table in self._setup.tables
        }
        return Hit(wanted, frozenset(block for listed in ids for block in listed))


@dataclass(slots=True, eq=False)
class _Asked:
    """An open question; its prompt is copied when it is its turn."""

    question: Question
    lookup: Lookup | None = None


class Answers:
    """Answers questions from vLLM's prefix cache, a bounded number in each step. `publish` is `Sending.answer`."""

    def __init__(
        self, setup: Setup, port: SchedulerPort, cache: PrefixCache, publish: Callable[[Question, Hit, int], bool]
    ) -> None:
        self._port = port
        self._cache = cache
        self._answer = publish
        share = setup.settings.prefix_share if setup.serves and setup.caches_prefixes else 0
        self._most = int(cache.pool.num_gpu_blocks * share)
        self._open: deque[_Asked] = deque()

    @property
    def possible(self) -> bool:
        """Whether this engine can answer with anything but a miss."""
        return self._most > 0

    @property
    def waiting(self) -> bool:
        """Whether vLLM must run steps for questions."""
        return bool(self._open)

    def work(self, *, refuses: bool = False) -> bool:
        """Look up what the new questions ask for, a bounded part of it; return whether there was a question. Called
        after vLLM has scheduled a step. `refuses`: the engine is paused, so that nothing more is held."""
        questions = self._port.questions()
        if questions:
            # Ended ones must not wait for their turn: each may have 1 MiB.
            self._open = deque(asked for asked in self._open if asked.question.open)
            self._open += map(_Asked, questions)
        if refuses:
            while self._open:
                self._port.miss(self._open.popleft().question, MissReason.BUSY)
        left = MOST_HASHED
        while self._open and left > 0:
            asked = self._open[0]
            if asked.question.open:
                left -= self._look_up(asked)
                if asked.lookup is not None and not asked.lookup.known:
                    continue
            self._open.popleft()
        return bool(questions)

    def _look_up(self, asked: _Asked) -> int:
        """Look up the next chunk of a prompt, and answer if it is the last; return for how many tokens it counts."""
        cache, question = self._cache, asked.question
        if self.possible and asked.lookup is None:
            asked.lookup = cache.lookup(question.prompt)
        if asked.lookup is None:
            self._port.miss(question, MissReason.UNSUPPORTED)
            return LEAST_COST
        hashed = cache.hash(asked.lookup)
        if asked.lookup.known:
            hit = cache.find(asked.lookup, question.first_token)
            if hit is None:
                self._port.miss(question, MissReason.NOT_CACHED)
            elif not self._answer(question, hit, self._most):
                self._port.miss(question, MissReason.BUSY)
        return max(LEAST_COST, hashed)
