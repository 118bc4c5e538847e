"""The class that vLLM loads, once per process."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.errors import InternalError
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.checked_planes import checked_planes
from kvferry.integrations.vllm.idle_steps import engine_in_making
from kvferry.integrations.vllm.registration import register
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.shards import RankPlace
from kvferry.integrations.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews
from kvferry.integrations.vllm.worker import ConnectorWorker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:
    # vLLM 0.31 does not record the source of a cache hit.
    HIT_SOURCE = None
else:
    HIT_SOURCE = CacheHitSource.P2P


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Implements vLLM's KV connector with kvferry: forwards calls to a `ConnectorScheduler` in the scheduler's process,
    and to a `ConnectorWorker` in each worker's. Calls from an engine's step return at once (R11)."""

    _cache_hit_source = HIT_SOURCE

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: a sleeping engine unmaps memory that NIXL has registered and that other engines read. vLLM
        calls this from 0.33 on; before, `check_supported` refuses."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = Setup.of(vllm_config, kv_cache_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = ConnectorWorker(self._setup, RankPlace.of_process().rank)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout in which the heads of a block on a rank are contiguous: blocks, heads, tokens."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # Called in the scheduler's process.

    @property
    def _in_scheduler(self) -> ConnectorScheduler:
        if self._scheduler is None:
            raise InternalError("this is a worker's connector")
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Begin with vLLM's prefix cache and block pool, in which published blocks are held. vLLM calls this while it
        makes the engine, before all that follows."""
        super().bind_kv_cache_manager(kv_cache_manager)
        cache = PrefixCache(self._setup, kv_cache_manager)
        self._scheduler = ConnectorScheduler(self._setup, cache, engine_in_making())

    def on_new_request(self, request: Any) -> None:
        self._in_scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to read, or None to be called again, and whether the read is asynchronous."""
        return self._in_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._in_scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Called by engines without the hybrid allocator."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that vLLM may free the blocks, which the connector holds itself, and the ``kv_transfer_params``."""
        return False, self._in_scheduler.finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._in_scheduler.step(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports of a step."""
        scheduler = self._in_scheduler
        scheduler.collect(connector_output.kv_connector_worker_meta, connector_output.invalid_block_ids or ())
        told = connector_output.finished_recving or set()
        scheduler.told(told)
        # vLLM reads the set after this call. vLLM has counted the workers' reports, and does not count these requests:
        # the port has the reports of all ranks.
        received = scheduler.take_received()
        if received:
            connector_output.finished_recving = {*told, *received}

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work()

    # Called in a worker's process.

    @property
    def _in_worker(self) -> ConnectorWorker:
        if self._worker is None:
            raise InternalError("this is a scheduler's connector")
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        metadata: StepMetadata = self._get_connector_metadata()
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the caches of this rank with NIXL. The first step announces them. Raises `LayoutMismatch`: vLLM
        writes elsewhere than the planes declare; `InvalidField`: the layout of a layer is unknown, or nothing has
        proven it."""
        place = RankPlace.of_process()
        planes = checked_planes(self._vllm_config, self._kv_cache_config, self._setup, kv_caches, place)
        self._in_worker.register(kv_caches, planes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._in_worker.step(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes a request only after its read."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: decode instances read from the cache itself."""

    def wait_for_save(self) -> None:
        """Record that the step is queued on the device, its drafter included. Does not wait."""
        self._in_worker.queued(self._step.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the reads that have ended according to the scheduler. Every worker returns the same, as vLLM
        expects."""
        step = self._step
        return KVConnectorTransferResults(set(), set(step.received), set(step.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed reads, which are quiet."""
        return set(self._step.lost)

    def build_connector_worker_meta(self) -> WorkerNews | None:
        return self._in_worker.news()

    # Called in both.

    def get_kv_connector_stats(self) -> KvferryStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        return KvferryStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvferryPromMetrics:
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


# MultiConnector finds its children's statistics by name, even if a child's configuration names its module.
register()
