"""Ranks of prefill around SGLang's real pools, allocators and radix caches, and an engine that asks them."""

from __future__ import annotations

import pickle
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvferry import Blocks, Client, EngineSpec, Prompt, Read
from kvferry.engine import SchedulerPort, WorkerOutput, WorkerPort
from kvferry.geometry import shard
from kvferry.integrations.sglang.answers import AnswerStep, RadixAnswers
from kvferry.integrations.sglang.loads import LoadStep, RadixLoads
from kvferry.integrations.sglang.manager import PREFIX_SOURCE, KvferryManager
from kvferry.integrations.sglang.metrics import counts_of
from kvferry.integrations.sglang.pools import Pools, describe_pools
from kvferry.testing import Fabric
from tests.support.waiting import until

PAGE, PAGES, HEADS, DIM, LAYERS, WINDOW = 4, 32, 2, 8, 2, 10
SIZE = PAGE * PAGES


class Memory:
    """SGLang's pool of a rank that holds all heads, its allocator, and its radix cache: "radix", "python" or "rust";
    windows: every second layer has a window."""

    def __init__(
        self, cache: str = "python", *, windows: bool = False, page: int = PAGE, rank: int = 0, ranks: int = 1
    ) -> None:
        self.page = page
        held = shard(rank, ranks, HEADS)
        self.pool: Any
        self.allocator: Any
        components = [ComponentType.FULL]
        if windows:
            components.append(ComponentType.SWA)
            self.pool = SWAKVPool(
                size=SIZE,
                size_swa=SIZE,
                page_size=page,
                dtype=torch.float32,
                head_num=len(held),
                head_dim=DIM,
                swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0],
                device="cpu",
            )
            self.allocator = SWATokenToKVPoolAllocator(SIZE, SIZE, page, torch.float32, "cpu", self.pool, False)
        else:
            self.pool = MHATokenToKVPool(SIZE, page, torch.float32, len(held), DIM, LAYERS, "cpu", False)
            self.allocator = PagedTokenToKVPoolAllocator(SIZE, page, torch.float32, "cpu", self.pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            sliding_window_size=WINDOW if windows else None,
            tree_components=tuple(components),
            tree_core_backend=None if cache == "radix" else cache,
        )
        self.tree: Any = RadixCache(params) if cache == "radix" else UnifiedRadixCache(params)
        self.pools: Pools = describe_pools(self.pool, held, HEADS, WINDOW, "layer.{}")

    def compute(self, tokens: Sequence[int], namespace: str | None = None, salt: str | None = None) -> None:
        """Compute a prompt, as far as SGLang's cache shows it."""
        whole = len(tokens) // self.page * self.page
        none, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([whole])
        slots = self.allocator.alloc_extend(none, none, lengths, lengths, torch.tensor([-1]), whole)
        key = RadixKey(array("q", tokens[:whole]), namespace, cache_salt=salt)
        self.tree.insert(InsertParams(key=key, value=slots.to(torch.int64)))

    def compute_part(self, pages: int) -> None:
        """Take room for the next part of a prompt, as SGLang does whether there is any or not."""
        none, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([pages * self.page])
        alloc_paged_token_slots_extend(self.tree, none, none, lengths, lengths, torch.tensor([-1]), pages * self.page)

    def cached(self, tokens: Sequence[int], namespace: str | None = None) -> torch.Tensor:
        """Where SGLang keeps what it has cached of a prompt."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), namespace)))
        found: torch.Tensor = self.tree.path_device_indices(match.last_device_node)[: match.device_prefix_len]
        return found

    @property
    def free(self) -> int:
        """Tokens that SGLang has room for without evicting."""
        return int(self.allocator.available_size())

    def evict(self, tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=tokens))


class Prefill(KvferryManager):
    """The manager of a rank, without SGLang's start."""

    worker: Any = None

    def __init__(self, port: SchedulerPort | None, pools: Pools, page: int, share: float) -> None:
        self.leader = port is not None
        self._port = port
        self._released = {}
        self._requests = WeakValueDictionary()
        self._breathed = 0.0
        self.adapters: dict[str, str] = {}
        self.prefix_share, self.prefix_wait = share, 2.0
        self.pools = pools
        self.kv_args = SimpleNamespace(state_types=[StateType.SWA] if pools.window else [], page_size=page)
        self.counts = counts_of(0)


class Rank:
    """A rank of prefill, between whose batches steps run."""

    def __init__(self, memory: Memory, port: SchedulerPort | None = None, share: float = 1.0) -> None:
        self.memory = memory
        self.scheduler = SimpleNamespace(
            tree_cache=memory.tree,
            token_to_kv_pool_allocator=memory.allocator,
            sliding_window_size=WINDOW,
            result_queue=deque(),
            _engine_paused=False,
            chunked_req=None,
        )
        self.manager: Any = Prefill(port, memory.pools, memory.page, share)
        self.answers = RadixAnswers(self.scheduler, self.manager)


def compute_in_parts(ranks: list[Rank], pages: int) -> None:
    """Let SGLang compute a prompt of so many pages in parts; 0: none."""
    for rank in ranks:
        rank.scheduler.chunked_req = SimpleNamespace(origin_input_ids=[0] * pages * PAGE) if pages else None


class Source:
    """An engine of prefill at a home of its own process, whose ranks take the same steps; rank 0 has a port."""

    def __init__(self, fabric: Fabric, cache: str = "python", ranks: int = 1, **memory: Any) -> None:
        share = memory.pop("share", 1.0)
        memories = [Memory(cache, **memory) for _ in range(ranks)]
        first = memories[0].pools
        self.client: Client = fabric.client()
        spec = EngineSpec("prefill", first.groups)
        self.port = SchedulerPort(self.client, spec)
        self.client.register_cache(
            spec, 0, tensors=first.tensors, planes=first.planes, token=str(self.port.token), serve=True
        )
        self.ranks = [Rank(each, None if at else self.port, share) for at, each in enumerate(memories)]
        self.leader = self.ranks[0]

    @property
    def memory(self) -> Memory:
        return self.leader.memory

    @property
    def published(self) -> int:
        """How many publications there were."""
        return self.client.stats().source.published

    def compute(self, tokens: Sequence[int], *named: Any) -> None:
        for rank in self.ranks:
            rank.memory.compute(tokens, *named)

    def write(self) -> None:
        """Write other bytes everywhere, which tell their places."""
        for at, tensor in enumerate(self.memory.pools.tensors.values()):
            flat: Any = tensor
            flat.copy_(torch.arange(flat.numel(), dtype=torch.float32).reshape(flat.shape) + at * 1_000_000)

    def loop(self) -> AnswerStep | None:
        """Take requests, as SGLang's loop does: what rank 0 decides goes to all ranks."""
        step = self.leader.answers.next_step()
        if step is not None:
            self.leader.answers.run(step)
            for rank in self.ranks[1:]:
                rank.answers.run(pickle.loads(pickle.dumps(step)))
        return step

    def loop_until(self, condition: Callable[[], object]) -> None:
        """Run the loop until something holds."""

        def holds() -> bool:
            self.loop()
            return bool(condition())

        until(holds)

    def serve(self, read: Read) -> Any:
        """Run the loop until a read has ended; returns its result, or raises its error."""
        self.loop_until(read.done)
        return read.result(0)

    def idle(self) -> None:
        """Run the loop until nothing is held."""
        self.loop_until(lambda: not any(rank.answers.holding for rank in self.ranks))


class Asker:
    """An engine of one rank with a pool of SGLang's, which asks."""

    def __init__(self, fabric: Fabric, source: Source, name: str = "reader", **memory: Any) -> None:
        self.memory = Memory(**memory)
        self.pools = self.memory.pools
        self.reference = source.port.engine_reference
        spec = EngineSpec(name, self.pools.groups)
        self.cache = fabric.client().register_cache(spec, 0, tensors=self.pools.tensors, planes=self.pools.planes)

    def ask(self, tokens: Sequence[int], first_token: int = 0, **more: Any) -> Read:
        pages = range(1 + first_token // self.memory.page, 1 + -(-len(tokens) // self.memory.page))
        blocks = {group.name: Blocks([*pages], first_token) for group in self.pools.groups}
        overlap = more.pop("allow_overlap", False)
        return self.cache.fetch(self.reference, Prompt([*tokens], **more), blocks, wait=2.0, allow_overlap=overlap)


class Reporting(Prefill):
    """The manager of a rank whose ranks report to rank 0 through a list, a step late."""

    reports: list[WorkerOutput]

    def gathered(self, output: WorkerOutput) -> list[WorkerOutput]:
        found = [*self.reports, output] if self.leader else []
        self.reports[:] = [] if self.leader else [*self.reports, output]
        return found


class Reader:
    """An engine of prefill whose requests name engines that may have their prefixes."""

    def __init__(self, fabric: Fabric, ranks: int = 1) -> None:
        memories = [Memory(rank=rank, ranks=ranks) for rank in range(ranks)]
        clients = [fabric.client() for _ in memories]
        spec = EngineSpec("reader", memories[0].pools.groups, ranks)
        self.port = SchedulerPort(clients[0], spec)
        self.ranks: list[Rank] = []
        self.loads: list[RadixLoads] = []
        reports: list[WorkerOutput] = []
        for at, (memory, client) in enumerate(zip(memories, clients, strict=True)):
            worker = WorkerPort(client, spec, at, token=str(self.port.token))
            worker.register(memory.pools.tensors, planes=memory.pools.planes, replicated=True)
            rank = Rank(memory, None if at else self.port)
            rank.manager = Reporting(rank.manager._port, memory.pools, PAGE, 1.0)
            rank.manager.reports = reports
            assert RadixLoads.possible(rank.scheduler, rank.manager)
            rank.manager.worker = worker
            rank.manager.loads = RadixLoads(rank.scheduler, rank.manager)
            self.ranks.append(rank)
            self.loads.append(rank.manager.loads)

    def compute(self, tokens: Sequence[int]) -> None:
        for rank in self.ranks:
            rank.memory.compute(tokens)

    def want(self, tokens: Sequence[int], source: object, **more: Any) -> int:
        """Let a request come to all ranks; returns the number of its load."""
        prompt = more.pop("prompt", Prompt([*tokens]))
        request = SimpleNamespace(
            origin_input_ids=array("q", tokens),
            sampling_params=SimpleNamespace(custom_params={PREFIX_SOURCE: source}),
            **{"extra_key": None, "cache_salt": None, "lora_id": None, **more},
        )
        [number] = {loads.want(request, prompt) for loads in self.loads}
        return number

    def loop(self) -> LoadStep | None:
        """Take requests, as SGLang's loop does."""
        step = self.loads[0].next_step()
        if step is not None:
            for loads in self.loads:
                loads.run(pickle.loads(pickle.dumps(step)))
        return step

    def finish(self, number: int, *sources: Source) -> None:
        """Run the loops of all until a load has ended."""

        def ended() -> bool:
            for source in sources:
                source.loop()
            self.loop()
            return not any(loads.waits(number) for loads in self.loads)

        until(ended)

    @property
    def whole(self) -> bool:
        """Whether each page is free, or in the cache and evictable, on every rank."""
        trees = [(rank.memory.tree, rank.memory.free) for rank in self.ranks]
        return all(tree.evictable_size() + free == SIZE and not tree.protected_size() for tree, free in trees)


def rows(pools: Pools, slots: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of tokens at these slots, by plane."""
    tensors: list[Any] = [*pools.tensors.values()]
    return [tensor[slots] for tensor in tensors]
