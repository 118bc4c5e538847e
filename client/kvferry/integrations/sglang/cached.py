"""Looks up prompts in SGLang's radix cache, and holds what it has of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvferry import MissReason


def spare_tokens(scheduler: Any) -> int:
    """Return for how many tokens SGLang has room beside a prompt that it computes in parts; less than 0: not even for
    that. SGLang counts the room for such a prompt once, computes each part whether there is room or not, and ends if
    there is none (``PrefillBudget.available_chunk_tokens``; 0.5.23)."""
    tree, chunked = scheduler.tree_cache, scheduler.chunked_req
    needed = 0 if chunked is None else len(chunked.origin_input_ids) + int(tree.page_size)
    return int(scheduler.token_to_kv_pool_allocator.available_size() + tree.evictable_size()) - needed


@dataclass(frozen=True, slots=True)
class RadixLookup:
    """A prompt that every rank looks up.

    Attributes:
        number: of the lookup.
        tokens: token ids, as SGLang keeps them.
        namespace: SGLang's ``extra_key`` of the requests that share such a cache; None: without one.
        first_token: what lies before it is not asked for.
    """

    number: int
    tokens: array[int]
    namespace: str | None
    first_token: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache has of a prompt from its first token on, in whole pages, and SGLang's lock on it.

    Attributes:
        slots: of each token, in the pool of full attention, on SGLang's device.
        pages: of all tokens, in the pool of full attention.
    """

    slots: Any
    pages: npt.NDArray[np.int64]
    lock: Any


class RadixPrefixes:
    """SGLang's radix cache on one rank. Every rank makes the same calls in the same order, since each changes what
    SGLang evicts next, which must be the same on all ranks.

    `pages` is the number of the pool's pages, of which at most the `share` is held.
    """

    def __init__(self, tree: Any, pages: int, share: float) -> None:
        self._tree = tree
        self._most = int(pages * share)
        self._holders = np.zeros(pages, np.int64)
        """How many held prompts have each page. Thousands may have the same beginning."""

    @staticmethod
    def of(tree: Any, pages: int, share: float) -> RadixPrefixes | None:
        """Return the prefixes of SGLang's cache; None: nothing may be held, the cache keeps nothing, or moves it to and
        from host memory or another store, so that a page in it may still be on its way."""
        simple = type(tree) in (RadixCache, UnifiedRadixCache) and tree.supports_prefix_sharing()
        if not (share and simple) or tree.cache_controller is not None or getattr(tree, "linker", None) is not None:
            return None
        return RadixPrefixes(tree, pages, share)

    def hold(self, lookup: RadixLookup) -> Held | MissReason:
        """Look up a prompt, and hold what the cache has of it, if that reaches behind the first token wanted. SGLang
        does not evict the pages until `free`."""
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(lookup.tokens, lookup.namespace)))
        tokens = int(match.device_prefix_len)
        if tokens <= lookup.first_token:
            return MissReason.NOT_CACHED
        slots = self._tree.path_device_indices(match.last_device_node)[:tokens]
        # Waits for the device, as SGLang does for the pages of each request that it sends.
        pages = kv_to_page_indices(slots, self._tree.page_size).astype(np.int64)
        if np.count_nonzero(self._holders) + np.count_nonzero(self._holders[pages] == 0) > self._most:
            return MissReason.BUSY
        self._holders[pages] += 1
        return Held(slots, pages, self._tree.lock(match.last_device_node))

    def free(self, held: Held) -> None:
        """Let SGLang evict the pages, unless others hold them."""
        self._holders[held.pages] -= 1
        self._tree.unlock(held.lock)
