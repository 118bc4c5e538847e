"""The parts of a rank that need no session of its engine: the memory, registered with NIXL, and the agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvferry._engine_spec import EngineSpec
from kvferry._memory.declared import Declared, memory_of
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_agent import ReadingAgent, ServingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transport
from kvferry._wire.authority import agent_name, new_agent_key
from kvferry.errors import Closed, InvalidField
from kvferry.geometry.model import RankGeometry, check_rank, check_regions
from kvferry.geometry.overlap import check_unshared
from kvferry.geometry.tensors import Tensor, held, named_tensors


class LocalRank:
    """The memory of one rank, registered with NIXL, and its agents. Makes no RPC and needs no token.

    Making it takes up to seconds: NIXL is loaded, and devices map or pin the memory.

    Threading: every method may be called from any thread; `close` waits.

    Attributes:
        agent: the serving agent; None: other ranks cannot read the memory.
        agent_key: the key that the serving agent is named after. Secret.

    Raises:
        BadGeometry: the planes contradict the engine's groups, lie over each other, or lie outside the regions.
        InvalidField: the engine has no such rank; or see `ServingAgent`.
        NixlError, NixlMissing: see `ServingAgent`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        rank: RankGeometry,
        memory: RankMemory,
        *,
        binding: Any,
        options: NixlOptions,
        staging: StagingOptions,
        serve: bool,
        clock: Callable[[], float],
    ) -> None:
        check_rank(spec.groups, rank)
        check_unshared(spec.groups, rank)
        check_regions(rank, memory.regions)
        if rank.rank >= spec.num_ranks:
            raise InvalidField("rank", rank.rank, f"below num_ranks {spec.num_ranks}")
        self.spec = spec
        self.rank = rank
        self.memory = memory
        self.closed = False
        self.agent_key = new_agent_key()
        self.agent: ServingAgent | None = None
        if serve:
            name = agent_name(self.agent_key, spec.engine_id, rank.rank)
            self.agent = ServingAgent(name, memory.regions, options, binding)
        self.transport = Transport(
            memory, options, reading=partial(ReadingAgent, binding=binding), staging=staging, clock=clock
        )

    def check_open(self) -> None:
        """Raise `Closed` if the memory was closed: its agents cannot be announced."""
        if self.closed:
            raise Closed(f"the memory of rank {self.rank.rank} of engine {self.spec.engine_id!r} was closed")

    def close(self, timeout: float) -> None:
        """End the agents; waits at most `timeout` seconds until all reads are quiet. Idempotent."""
        self.closed = True
        self.transport.close(timeout)
        if self.agent is not None:
            self.agent.close()


def describe(
    engine: EngineSpec, rank: int, tensors: Mapping[str, Tensor] | None, declared: Declared
) -> tuple[RankGeometry, RankMemory]:
    """Return a rank's geometry and its memory, from the arguments of `Client.register_cache`; raises the same
    errors."""
    if tensors is not None:
        # Keeps the memory alive even if the caller changes its mapping or drops its tensors.
        tensors = {name: held(tensor) for name, tensor in named_tensors(tensors).items()}
    planes, regions = memory_of(engine, tensors, declared)
    labels = {} if declared.labels is None else declared.labels
    memory = RankMemory(regions, tuple((tensors or {}).values()), keep=(tensors, _kept(declared.keep)))
    return RankGeometry(rank, planes, labels), memory


def _kept(keep: object) -> object:
    """Return the object to keep referenced; of a container, a copy with its present contents."""
    if isinstance(keep, Mapping):
        return dict(keep)
    return tuple(keep) if isinstance(keep, (list, set)) else keep
