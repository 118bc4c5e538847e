"""The parts behind the public objects: `ClientRuntime` behind a `Client`, `RankRuntime` behind a `Cache`, and, of the
latter, `LocalRank`, which needs no session of the rank's engine. Only this module makes them and connects them."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvferry._clock import from_duration, now
from kvferry._control.backoff import retrying
from kvferry._control.homes import Homes
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.notifier import SENT_BYTES, check_size
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import PromptCheck
from kvferry._engine_spec import EngineSpec
from kvferry._integrity.checksum_publisher import Checksummer
from kvferry._integrity.summed_blocks import IntegrityOptions
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.cache_reads import CacheReads
from kvferry._reads.meters import ReadMeter, ShareMeter
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.source_engines import SourceEngines
from kvferry._reads.verifier import Verifier
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import ReadingAgent, ServingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transport
from kvferry._wire.authority import AGENT_KEY_BYTES, agent_name
from kvferry._wire.geometry_codec import agent_to_proto, group_to_proto, rank_to_proto
from kvferry._wire.reference import parse_source_reference
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import Closed, EngineUnknown, InvalidField, KvferryError
from kvferry.geometry.model import AgentInfo, RankGeometry, check_rank, check_regions
from kvferry.geometry.overlap import check_apart
from kvferry.planner.path_choice import Costs, PathRule
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

MEASURE_TIMEOUT = 2.0
"""Seconds for measuring the costs of reads from a source. A slower source is not measured, so that its first read does
not wait."""

REFILL_TIMEOUT = 5.0
"""Seconds for registering a rank again at a home that has lost its record; the home's next request tries again."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientRuntime:
    """The parts that all caches and ports of a client share. For options see `Client`."""

    loop: Loop
    homes: Homes
    renewals: Renewals
    binding: Any
    options: NixlOptions
    staging: StagingOptions
    integrity: IntegrityOptions
    prompt_check: PromptCheck
    optimistic: bool
    reads: ReadMeter = field(default_factory=ReadMeter)
    shares: ShareMeter = field(default_factory=ShareMeter)

    def lease_holder(self, token: EngineToken, rank: int | None = None) -> LeaseHolder:
        """Make the lease holder of one process of an engine, for one rank, or, if `rank` is None, for all ranks."""
        return LeaseHolder(
            self.loop,
            self.homes,
            self.renewals,
            token,
            rank,
            self.prompt_check,
            # Sums are read under a lease.
            optimistic=self.optimistic and not self.integrity.share,
        )


class LocalRank:
    """The memory of one rank, registered with NIXL, and its agents. Makes no RPC and needs no token. Making it takes up
    to seconds: NIXL is loaded, and devices map or pin the memory. Thread-safe; `close` waits.

    Attributes:
        agent: the serving agent; None: other ranks cannot read the memory.
        agent_key: the key that the serving agent is named after. Secret.

    Raises:
        BadGeometry: the planes contradict the engine's groups, lie over each other, or lie outside the regions.
        InvalidField: the engine has no such rank; or see `ServingAgent`.
        NixlError, NixlMissing: see `ServingAgent`.
    """

    def __init__(
        self, client: ClientRuntime, spec: EngineSpec, rank: RankGeometry, memory: RankMemory, *, serve: bool
    ) -> None:
        check_rank(spec.groups, rank)
        check_apart(spec.groups, rank.rank, rank.planes, may_share=True)
        check_regions(rank, memory.regions)
        if rank.rank >= spec.num_ranks:
            raise InvalidField("rank", rank.rank, f"below num_ranks {spec.num_ranks}")
        self.spec = spec
        self.rank = rank
        self.memory = memory
        self.closed = False
        self.agent_key = secrets.token_bytes(AGENT_KEY_BYTES)
        self.agent: ServingAgent | None = None
        if serve:
            name = agent_name(self.agent_key, spec.engine_id, rank.rank)
            self.agent = ServingAgent(name, memory.regions, client.options, client.binding)
        reading = partial(ReadingAgent, binding=client.binding)
        self.transport = Transport(
            memory, client.options, reading=reading, staging=client.staging, clock=client.loop.now
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


class RankRuntime:
    """The parts of one rank of an open engine: its registration, its source engines, and its reads.

    Threading: every method may be called from any thread, but for the coroutines, which belong to the client's event
    loop; `close` waits. Raises `MessageTooLarge` if the registration of the rank does not fit into one message.
    """

    def __init__(self, client: ClientRuntime, local: LocalRank, token: EngineToken) -> None:
        spec, rank = local.spec, local.rank
        self.spec = spec
        self.token = token
        self.rank = rank
        self.homes = client.homes
        loop, memory, integrity, staging = client.loop, local.memory, client.integrity, client.staging
        self.loop = loop
        self._closed = False
        self._registration = _registration(local, token)
        self._local = local
        self.transport = local.transport
        rule = PathRule(
            path=staging.chosen,
            costs=staging.costs or Costs(),
            slot_bytes=staging.slot_bytes,
            device_memory=memory.devices,
        )
        costs = _MeasuredCosts(loop, rule, rank, self.transport, measured=staging.costs is None)
        reader, home, transport = engine_ref(token), client.homes.home_of(token), self.transport
        self._sources = SourceEngines(loop, spec, reader, rank, home, rule, costs.rule_of, transport.retire)
        self.checksummer = Checksummer(loop, home, spec, token, rank, memory, integrity)
        verifier = Verifier(loop, reader, memory, integrity) if integrity.share else None
        self.shares = RankReads(loop, self.transport, self._sources, memory, verifier, client.shares)
        self.holder = client.lease_holder(token, rank.rank)
        self.reads = CacheReads(loop, rank.rank, self.holder, self._sources, self.shares, client.reads)

    async def register(self, timeout: float) -> float:
        """Register the rank at the node server; try for `timeout` seconds. Returns the seconds from now during which
        blocks of memory that survived a restart must not be reused."""
        own = self.homes.own
        what = f"the registration of rank {self.rank.rank} of engine {self.spec.engine_id!r} at {own.address}"
        until = self.loop.now() + timeout
        answer = await retrying(lambda left: own.register_cache(self._registration, left), until, what=what)
        self.homes.known_as(answer.advertise)
        return from_duration(answer.reuse_after)

    async def register_again(self) -> None:
        """Register the rank again at a home that has lost the rank's record; a refusal for good is logged. Idempotent.
        Raises the error if repeating can help, and `EngineUnknown`: the home has restarted again, or was cut off, and
        the engine's scheduler may come back to it."""
        if self._closed:
            return
        try:
            await self.register(REFILL_TIMEOUT)
        except KvferryError as error:
            if error.retryable or isinstance(error, EngineUnknown):
                raise
            message = "rank %d of engine %s could not be registered again: %s"
            logger.warning(message, self.rank.rank, self.spec.engine_id, error)

    def warm(self, engine_reference: str, deadline: float) -> Future[tuple[int, ...]]:
        """See `Cache.warm`."""
        engine = parse_source_reference(engine_reference)
        home = self.homes.of(engine)
        key = (home.address, engine.engine_id, engine.incarnation)

        async def run() -> tuple[int, ...]:
            source = await self._sources.get(home, key, engine_reference, deadline)
            for agent in source.agents.values():
                self.transport.warm(agent)
            return tuple(source.agents)

        return self.loop.answer(run(), "the client is closed")

    def close(self, timeout: float) -> None:
        """Cancel the reads, and end the agents. Waits at most `timeout` seconds until all blocks are quiet, and the
        homes have the reports. Idempotent."""
        until = self.loop.now() + timeout
        self.abandon(timeout)
        self._local.close(max(0.0, until - self.loop.now()))

    def abandon(self, timeout: float = 0.0) -> None:
        """Cancel the reads; the memory stays registered with NIXL, for another attempt. Idempotent."""
        if self._closed:
            return
        self._closed = True
        until = self.loop.now() + timeout
        self.reads.close(until)
        with suppress(Closed):
            self.loop.run(self.holder.close(max(0.0, until - self.loop.now())))
        self.checksummer.close()


class _MeasuredCosts:
    """Measures the costs of reads, for the rule by which a rank chooses paths: once per home, assuming that all ranks
    behind a home are reached in the same way, and one home at a time. Two measurements would falsify each other, and
    each could wait for staging memory that the other has borrowed. Belongs to the client's event loop."""

    def __init__(self, loop: Loop, rule: PathRule, rank: RankGeometry, transport: Transport, *, measured: bool) -> None:
        self._loop = loop
        self._rule = rule
        # Costs are measured for one plane: the planes of a rank are assumed to lie in memory of the same kind.
        self._plane = rank.planes[0]
        self._transport = transport
        self._measured = measured
        self._measuring: asyncio.Task[None] | None = None
        """The last measurement."""
        self._rules: dict[str, PathRule] = {}

    async def rule_of(self, home: str, agent: AgentInfo, deadline: float) -> PathRule | None:
        """Return the rule for sources behind this home, measured at one of their agents; None: keep the given rule."""
        if not self._measured:
            return None
        until = min(deadline, now() + MEASURE_TIMEOUT)
        while home not in self._rules and self._measuring is not None and not self._measuring.done():
            if now() >= until:
                return None
            await asyncio.wait([self._measuring], timeout=until - now())
        if home not in self._rules:
            measure = self._loop.on_thread(partial(self._measure, home, agent, until), "kvferry-plan-costs")
            self._measuring = asyncio.ensure_future(measure)
            await self._measuring
        return self._rules.get(home)

    def _measure(self, home: str, agent: AgentInfo, deadline: float) -> None:
        try:
            pool = self._transport.pool(self._plane.memory_kind, self._plane.device)
        except KvferryError as error:
            # No memory for staging, or none that stays mapped. Reads that need staging raise this error.
            logger.info("reads from %s are not measured: %s", home, error)
            return
        costs = measure(self._transport, agent, pool, deadline)
        if costs is not None:
            self._rules[home] = replace(self._rule, costs=costs)


def _registration(local: LocalRank, token: EngineToken) -> pb.RegisterCacheRequest:
    spec, rank, agent = local.spec, local.rank, local.agent
    registration = pb.RegisterCacheRequest(
        engine=engine_ref(token),
        session_secret=token.session_secret,
        home=token.home,
        num_ranks=spec.num_ranks,
        identity=spec.identity,
        groups=[group_to_proto(group) for group in spec.groups],
        rank=rank_to_proto(rank),
        agent=None if agent is None else agent_to_proto(agent.info),
        agent_key=b"" if agent is None else local.agent_key,
        partial=spec.partial,
    )
    what = (
        f"the registration of rank {rank.rank} with {len(rank.planes)} planes, {len(local.memory.regions)} regions and "
        f"{registration.agent.ByteSize()} bytes of its agent"
    )
    check_size(what, registration, SENT_BYTES)
    return registration
