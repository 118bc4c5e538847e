"""An engine that asks for prefixes: its cache and its requests are played, its scheduler and port are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.setup import Setup
from tests.integrations.vllm.played_setup import BLOCKS, TOKENS, of_text
from tests.support.waiting import until


class OwnCache:
    """vLLM's prefix cache of an engine that has the first `tokens` tokens of every prompt, and `blocks` of every
    request."""

    def __init__(self) -> None:
        self.tokens = 0
        self.blocks: list[int] = []
        self.freed: list[str] = []
        self.pool = BlockPool(BLOCKS, False, TOKENS)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks,)

    def see(self, request: Any) -> None: ...

    def own(self, request: Any) -> int:
        return self.tokens

    def free(self, request: Any) -> None:
        self.freed.append(request.request_id)


def scheduler_of(setup: Setup, **options: Any) -> ConnectorScheduler:
    """The connector's scheduler of an engine with such a cache."""
    return ConnectorScheduler(setup, cast(PrefixCache, OwnCache()), None, **options)


def bound(scheduler: ConnectorScheduler, tokens: int = 0) -> OwnCache:
    cache = cast(OwnCache, scheduler._prefixes._cache)
    cache.tokens = tokens
    return cache


def hinted(source: str, tokens: int = 4 * TOKENS + 1, request_id: str = "reader", **more: Any) -> Any:
    """A request that names the engine that may have its prefix."""
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params={PREFIX_SOURCE: source},
        num_computed_tokens=0,
        num_tokens=tokens,
        status=RequestStatus.WAITING,
        skip_reading_prefix_cache=False,
        abort_immediately=False,
        **{**of_text(range(tokens)), "cache_salt": None, **more},
    )


def matched(scheduler: ConnectorScheduler, request: Any, computed: int = 0) -> tuple[int | None, bool]:
    """What vLLM is told when there is an answer."""
    found: list[tuple[int | None, bool]] = []

    def known() -> bool:
        scheduler.step({})
        found[:] = [scheduler.matched_tokens(request, computed)]
        return found[0][0] is not None

    until(known)
    return found[0]


def counted(scheduler: ConnectorScheduler) -> dict[str, Any]:
    stats = scheduler.take_stats()
    return {} if stats is None else stats.data
