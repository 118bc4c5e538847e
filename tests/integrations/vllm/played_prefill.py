"""A prefill engine whose block pool is vLLM's, and whose scheduler and port are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvferry import Blocks, Group, router_reference
from kvferry._control.publications import Release
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.engine import SchedulerPort
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.requests import REFERENCE
from kvferry.integrations.vllm.sending import Sending
from kvferry.integrations.vllm.setup import BlockTable, Setup
from kvferry.integrations.vllm.values import StepsDone, Summed
from tests.integrations.vllm.played_port import Port

TOKENS, BLOCKS = 4, 32
FULL = BlockTable(0, Group("full", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0, pool="device"), TOKENS)
WINDOW = BlockTable(
    1, Group("window", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0, pool="device"), TOKENS, window_tokens=8
)


class Prefill:
    """A scheduler of vLLM with one or two groups, over a real pool."""

    def __init__(
        self,
        *tables: BlockTable,
        ranks: int = 1,
        caching: bool = False,
        rewritten: int = 0,
        serves: bool = True,
        states: bool = False,
        drafts: bool = False,
    ) -> None:
        self.tables = tables or (FULL,)
        self.pool = BlockPool(BLOCKS, caching, TOKENS)
        self.port = Port()
        self.now = 0.0
        setup = SimpleNamespace(
            spec=SimpleNamespace(num_ranks=ranks, engine_id="prefill"),
            tables=self.tables,
            sums=True,
            withheld=0,
            rewritten=rewritten,
            serves=serves,
            has_states=states,
            drafts_states=drafts,
            names_inputs=True,
            published=self.published,
        )
        self.counts: list[str] = []
        self.sums: list[Summed] = []
        self.sending = Sending(
            cast(Setup, setup),
            cast(SchedulerPort, self.port),
            cast(PrefixCache, SimpleNamespace(pool=self.pool, block_ids=self.ids)),
            self.sums,
            self.counts.append,
        )
        self.sending._now = lambda: self.now
        self.blocks: dict[str, list[list[Any]]] = {}
        self.free = self.pool.get_num_free_blocks()

    def published(self, block_ids: tuple[list[int], ...], tokens: int) -> dict[str, Blocks]:
        return {table.group.name: table.published(block_ids[table.index], tokens) for table in self.tables}

    def ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in listed] for listed in self.blocks[request_id])

    def request(self, request_id: str, prompt: int, reference: str = "", **params: Any) -> Any:
        found = SimpleNamespace(
            request_id=request_id,
            kv_transfer_params={"do_remote_decode": True, REFERENCE: reference or made(), **params},
            status=RequestStatus.WAITING,
            num_computed_tokens=0,
            num_prompt_tokens=prompt,
            num_tokens=prompt,
            num_output_tokens=0,
            max_tokens=1,
            prompt_token_ids=list(range(prompt)),
            all_token_ids=list(range(prompt + 1)),
            mm_features=[],
            prompt_embeds=None,
            cache_salt=None,
            lora_request=None,
            resumable=False,
        )
        self.sending.expect(found)
        self.blocks[request_id] = [[] for _ in self.tables]
        return found

    def step(self, *scheduled: tuple[Any, int]) -> int:
        """Begin a step that computes so many tokens of requests."""
        for request, count in scheduled:
            request.status = RequestStatus.RUNNING
            wanted = -(-(request.num_computed_tokens + count) // TOKENS)
            for listed in self.blocks[request.request_id]:
                listed += self.pool.get_new_blocks(max(0, wanted - len(listed)))
        step = self.sending.begin({request.request_id: count for request, count in scheduled})
        for request, count in scheduled:
            request.num_computed_tokens += count
        return step

    def ended(self, step: int, rank: int = 0, computed: int | None = None) -> None:
        self.sending.computed({rank: StepsDone(step if computed is None else computed, step)})

    def run(self, request: Any, count: int) -> None:
        self.ended(self.step((request, count)))

    def preempt(self, request: Any) -> None:
        self.free_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def free_blocks(self, request: Any) -> None:
        for listed in self.blocks[request.request_id]:
            self.pool.free_blocks(reversed(listed))
            listed.clear()

    def finish(self, request: Any, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        request.status = status
        if status is RequestStatus.FINISHED_LENGTH_CAPPED:
            request.num_tokens += 1
        params = self.sending.finish(request, self.ids(request.request_id))
        self.free_blocks(request)
        return params

    def release(self, number: int, request_id: str = "r", outcome: ReleaseOutcome = ReleaseOutcome.READ) -> None:
        self.sending.released([Release(number, request_id, outcome)])

    def check_freed(self) -> None:
        """Nothing is held for ever, and nothing was freed twice."""
        assert self.used == 0
        assert all(block.ref_cnt == 0 for block in self.pool.blocks[1:])

    @property
    def used(self) -> int:
        return int(self.free - self.pool.get_num_free_blocks())


def made() -> str:
    return router_reference("127.0.0.1:1", "prefill")
