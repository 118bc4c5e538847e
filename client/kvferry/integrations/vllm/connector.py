"""The class that vLLM loads, once per process; it only passes on."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.errors import InternalError
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.integrations.vllm.setup import Setup, planes_of
from kvferry.integrations.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews
from kvferry.integrations.vllm.worker import ConnectorWorker


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector over kvferry. See the package for how it is configured.

    In the scheduler's process it is a `ConnectorScheduler`, in each worker's a `ConnectorWorker`; every call is made
    from an engine's step and returns at once (R11).
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = Setup.of(vllm_config, kv_cache_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(self._setup)
        else:
            rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
            self._worker = ConnectorWorker(self._setup, rank)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Blocks, heads, tokens: a rank's heads of a block are one piece."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # In the scheduler's process.

    @property
    def _in_scheduler(self) -> ConnectorScheduler:
        if self._scheduler is None:
            raise InternalError("this is a worker's connector")
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._in_scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups that may be transferred."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that will be read; None: ask again."""
        return self._in_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        self._in_scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, in an engine without the hybrid allocator."""
        return self._in_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        return self._in_scheduler.finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What goes to the workers with this step."""
        return self._in_scheduler.step(idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """What came from the workers with a step."""
        self._in_scheduler.collect(connector_output.kv_connector_worker_meta)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM has to step although it has no request."""
        return self._scheduler is not None and self._scheduler.has_work()

    # In a worker's process.

    @property
    def _in_worker(self) -> ConnectorWorker:
        if self._worker is None:
            raise InternalError("this is a scheduler's connector")
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise InternalError(f"vLLM gave a {type(metadata).__name__} for the step")
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The rank's caches."""
        tp_rank = get_tp_group().rank_in_group
        planes = planes_of(self._vllm_config, self._kv_cache_config, self._setup, kv_caches, tp_rank)
        self._in_worker.has_caches(kv_caches, planes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start what the step says."""
        self._in_worker.step(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is read while it is computed with."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Decode reads from the cache itself."""

    def wait_for_save(self) -> None:
        """Decode reads from the cache itself."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the scheduler has found ended, said back by every worker, so that vLLM's counts are exact."""
        step = self._step
        return KVConnectorTransferResults(set(step.sent), set(step.received), set(step.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed reads, quiet by now."""
        return set(self._step.lost)

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """What the scheduler has to hear."""
        return self._in_worker.news()

    # In either.

    def get_kv_connector_stats(self) -> KvferryStats | None:
        """Counts since the last call."""
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        """Counts that have come from another process."""
        return KvferryStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvferryPromMetrics:
        """The same for Prometheus."""
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """The engine ends."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
