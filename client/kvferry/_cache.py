"""A rank's cache as its node server and its readers know it, and the reads into it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvferry import _arguments as arguments
from kvferry._clock import from_duration, now
from kvferry._control.batches import check_size
from kvferry._control.block_use import BlockUse
from kvferry._control.connection import Control, retrying
from kvferry._control.homes import Homes
from kvferry._control.renewals import Renewals
from kvferry._control.session import EngineSession
from kvferry._engine_spec import EngineSpec
from kvferry._forks import OneProcess
from kvferry._memory.permute import device_tensors
from kvferry._memory.summing import Summers
from kvferry._reads.checksum_publisher import Checksummer
from kvferry._reads.rank_reads import RankRead, RankReads
from kvferry._reads.read import Read
from kvferry._reads.reader import Reader, ReadRequest
from kvferry._reads.source_engines import SourceEngine, SourceEngines, whole_engine
from kvferry._reads.verifier import Verifier
from kvferry._threads import start_thread
from kvferry._transport.agents import Agents
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import AgentInfo, ServingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transport, TransportGauges
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto, region_to_proto
from kvferry._wire.reference import parse_engine_reference, parse_reference
from kvferry._wire.token import EngineToken
from kvferry.errors import Closed, InvalidField, KvferryError, MessageTooLarge, WrongState
from kvferry.geometry.blocks import Blocks, blocks_by_group
from kvferry.geometry.model import EngineGeometry, MemoryRegion, RankGeometry, check_rank, check_regions
from kvferry.geometry.tensors import Tensor
from kvferry.planner.path_choice import Costs, PathRule
from kvferry.planner.request_blocks import written
from kvferry.planner.summed_blocks import IntegrityOptions
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

MEASURE_TIMEOUT = 2.0
"""Seconds for measuring what reads cost; a peer that takes longer is not measured, and its first read does not wait."""

OPEN_TIMEOUT = 30.0
"""Seconds to wait for an engine: longer than the engine ttl for which a predecessor keeps the engine_id."""

READ_TIMEOUT = 120.0
"""Seconds a read may take unless it says otherwise, its wait for the publication included."""


class Cache(OneProcess):
    """One registered rank. Made by `Client.register_cache`.

    The memory must stay mapped, and its tensors referenced, for the life of the process: NIXL revokes nothing.

    Threading: every method may be called from any thread; `read`, `prepare` and `warm` never wait.
    """

    def __init__(
        self,
        homes: Homes,
        renewals: Renewals,
        spec: EngineSpec,
        token: EngineToken,
        rank: RankGeometry,
        regions: tuple[MemoryRegion, ...],
        *,
        agents: Agents,
        serve: bool,
        options: NixlOptions,
        staging: StagingOptions,
        integrity: IntegrityOptions,
        tensors: Sequence[Tensor],
        max_reads: int,
        session: EngineSession | None,
        timeout: float,
        keep: object,
    ) -> None:
        check_rank(spec.groups, rank)
        check_regions(rank, regions)
        if rank.rank >= spec.num_ranks:
            raise InvalidField("rank", rank.rank, f"below num_ranks {spec.num_ranks}")
        self.spec = spec
        self.rank = rank
        self._session = session
        # Reads of this rank, beside what this process publishes for all ranks.
        self._writes = (BlockUse(spec.groups) if session is None else session.block_use).writes(rank.rank)
        self._homes = homes
        self._token = token
        self._keep = keep
        self._closed = False
        self._lock = threading.Lock()
        self._whole: EngineGeometry | None = None
        self._agent: ServingAgent | None = None
        if serve:
            name = f"kvferry/{spec.engine_id}/{token.incarnation.hex()}/{rank.rank}/serving"
            self._agent = agents.serving(name, regions, options)
        self._registration = pb.RegisterCacheRequest(
            engine=token.ref(),
            session_secret=token.session_secret,
            home=token.home,
            num_ranks=spec.num_ranks,
            identity=spec.identity,
            groups=[group_to_proto(group) for group in spec.groups],
            rank=rank_to_proto(rank),
            agent=_agent_to_proto(self._agent) if self._agent else None,
        )
        try:
            check_size(
                f"the registration of rank {rank.rank} with {len(rank.planes)} planes, {len(regions)} regions and "
                f"{self._registration.agent.ByteSize()} bytes of its agent",
                self._registration,
            )
        except MessageTooLarge:
            if self._agent is not None:
                self._agent.close()
            raise
        self._staging = staging
        self._rules: dict[str, PathRule] = {}
        self._transport = Transport(regions, options, agents=agents, staging=staging, tensors=tensors, keep=keep)
        rule = PathRule(
            path=staging.chosen,
            costs=staging.costs or Costs(),
            slot_bytes=staging.slot_bytes,
            device_memory=frozenset(device_tensors(tensors)),
        )
        self._peers = SourceEngines(
            spec, token.ref(), rank.rank, self._geometry, rule, partial(self._measure, rule), self._drop
        )
        self._summers = Summers(tensors)
        self._checksummer = Checksummer(homes.home_of(token), spec, token, rank, self._summers, integrity)
        self._verifier = Verifier(token.ref(), self._summers, integrity) if integrity.share else None
        self._reader = Reader(token, rank.rank, self._transport, self._peers, renewals, max_reads, self._verifier)
        self._rank_reads: list[RankReads] = []
        try:
            answer = self._register(timeout)
        except KvferryError:
            self.close()
            raise
        self.reuse_after = from_duration(answer.reuse_after)
        """Seconds from now for which no block of memory that survived a restart may be given out."""
        homes.known_as(answer.advertise)

    @property
    def session(self) -> EngineSession:
        """The engine's session; raises `WrongState` where another process has it."""
        if self._session is None:
            engine_id = self.spec.engine_id
            raise WrongState(
                f"another process opened engine {engine_id!r} and has its session: publish there, or open the engine "
                "here, with Client.open_engine",
                engine_id=engine_id,
            )
        return self._session

    def read(
        self,
        reference: str,
        blocks: Mapping[str, Blocks],
        tokens: tuple[int, int] | None = None,
        *,
        layers: Collection[str] | None = None,
        read_id: str | None = None,
        parties: int = 1,
        expected_reads: int = 0,
        timeout: float = READ_TIMEOUT,
        allow_overlap: bool = False,
    ) -> Read:
        """Start to read a publication into this rank's blocks. Returns at once.

        Args:
            reference: as it came with the request.
            blocks: local blocks by group; `Blocks.first_token` is the first token wanted.
            tokens: the tokens wanted, ``[a, b)``; None: all that was published.
            layers: names of the layers wanted, some of this rank's; None: all. Reads of parts are reads of their own:
                say how many with `expected_reads`.
            read_id: a name that every rank of one read gives it; None: a random one, for an engine of one rank. No
                secret: what the home is told is derived from it and the engine's secret.
            parties: ranks that will report under this read_id.
            expected_reads: reads that will be made of the publication (n-way sampling); 0: what its source said.
            timeout: seconds until the read fails, the wait for the publication included (R5).
            allow_overlap: also into blocks that another read of this cache writes, or that this process has published:
                for engines that know that the bytes are others.

        Raises:
            BadReference: not a reference.
            HomeNotAllowed: its home may not be dialled.
            BadBlock: a block is not one of this engine, another read may still write to it, or it is published.
            InvalidField: an argument is out of range, or of another type.
            LimitReached: too many reads are running.
            ForkedClient, Closed: this cache cannot read any more.

        Everything else is raised by the read's `result`.
        """
        self._check_open()
        parsed = parse_reference(reference)
        parties = arguments.integer("parties", parties, 1, 2**31 - 1)
        if parties > 1 and read_id is None:
            raise InvalidField("read_id", None, f"the name that each of the {parties} parties gives to this read")
        deadline = now() + arguments.seconds("timeout", timeout)
        wanted = None if layers is None else frozenset(arguments.texts("layers", layers))
        unknown = sorted((wanted or frozenset()) - {plane.layer for plane in self.rank.planes})
        if unknown:
            raise InvalidField("layers", unknown, "names of layers that this rank holds")
        mine, asked = blocks_by_group("blocks", blocks), arguments.token_range(tokens)
        request = ReadRequest(
            home=self._homes.get(parsed.home),
            reference=parsed,
            text=reference,
            blocks=mine,
            tokens=asked,
            layers=wanted,
            parties=parties,
            expected_reads=arguments.integer("expected_reads", expected_reads, 0, 2**31 - 1),
            deadline=deadline,
        )
        identifier = secrets.token_hex(8) if read_id is None else arguments.text("read_id", read_id)
        if not 1 <= len(identifier.encode()) <= 256:
            raise InvalidField("read_id", identifier, "1 to 256 bytes")
        started: list[Read] = []
        key = self._writes.begin(
            identifier,
            written(self.spec.groups, None, mine, asked),
            layers=wanted,
            quiet=lambda: bool(started) and started[0].quiet,
            allow_overlap=arguments.flag("allow_overlap", allow_overlap),
        )
        try:
            started.append(self._reader.start(request, identifier))
        except BaseException:
            self._writes.end(key)
            raise
        return started[0]

    def checksum(
        self, publication: int, blocks: Mapping[str, Blocks], *, last: bool = True, timeout: float = READ_TIMEOUT
    ) -> Future[int]:
        """Sum this rank's part of published blocks, and send the sums to the home for readers in integrity mode.

        Returns at once; the work is done on a thread of the cache, on the device that holds the memory. Does nothing
        where the client's integrity mode is off.

        Args:
            publication: its number, `Publication.number`. Publish with ``checksums=True``, or readers do not wait.
            blocks: as they were published; those of one step of a progressive publication.
            last: no more blocks of this publication will be summed.
            timeout: seconds to keep trying.

        Returns:
            How many sums were sent, once they are at the home. Raises there what the home refused.

        Raises:
            BadBlock, InvalidField: the blocks are not ones of this engine, or lie in device memory that is not backed
                by a registered tensor.
            ForkedClient, Closed: this cache cannot be used any more.
        """
        self._check_open()
        return self._checksummer.submit(
            arguments.integer("publication", publication, 1, 2**63 - 1),
            blocks_by_group("blocks", blocks),
            last=arguments.flag("last", last),
            timeout=arguments.seconds("timeout", timeout),
        )

    def prepare(self) -> None:
        """Make the reading agents now; the first read from anybody is the better part of a second faster for it.

        Returns at once. Raises `ForkedClient`, `Closed`: this cache cannot be used any more.
        """
        self._check_open()
        self._transport.prepare()

    @property
    def engine_reference(self) -> str:
        """What routers give to this engine's readers to warm up with. A capability: who has it can reach the memory
        that the engine's ranks registered."""
        return self._token.engine_reference

    def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> Future[tuple[int, ...]]:
        """Do now what the first read from an engine would wait for: handshake, plan, agents, connections, and one byte
        from each of its ranks that this one reads from.

        Returns at once; a hint, which changes nothing but the time of the first read.

        Args:
            engine_reference: the engine's, `Cache.engine_reference` or `SchedulerPort.engine_reference` there. Another
                start of the engine has another one.
            timeout: seconds to wait until it is complete.

        Returns:
            The ranks that connections are being opened to, once the handshake is done. Raises there what `Read.result`
            would.

        Raises:
            BadReference: not an engine's reference.
            HomeNotAllowed: the home may not be dialled.
            LimitReached: the system gives no thread.
            ForkedClient, Closed: this cache cannot be used any more.
        """
        self._check_open()
        deadline = now() + arguments.seconds("timeout", timeout)
        engine = parse_engine_reference(arguments.text("engine_reference", engine_reference))
        control = self._homes.get(engine.home)
        done: Future[tuple[int, ...]] = Future()
        # As of a call that runs: who gives up waiting for it cancels nothing.
        done.set_running_or_notify_cancel()

        def run() -> None:
            try:
                peer = self._peers.get(control, engine.engine_id, engine.incarnation, engine_reference, deadline)
                for agent in peer.agents.values():
                    self._transport.warm(agent)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(tuple(peer.agents))

        start_thread(run, f"kvferry-warm-{engine.engine_id}")
        return done

    def rank_reads(self, ended: Callable[[RankRead], None], quiesced: Callable[[RankRead], None]) -> RankReads:
        """Shares of reads whose lease another process holds; see `RankReads`. Closed with the cache."""
        self._check_open()
        made = RankReads(self._transport, self._peers, self._summers, self._verifier, ended, quiesced)
        with self._lock:
            self._rank_reads.append(made)
        return made

    def home(self, address: str) -> Control:
        """The node server of this address; raises `HomeNotAllowed`. Makes no call."""
        return self._homes.get(arguments.text("home", address))

    def gauges(self) -> TransportGauges:
        """What the data plane of this rank is doing."""
        return self._transport.gauges()

    def close(self, timeout: float = 10.0) -> None:
        """Cancel the reads and end the agents. Idempotent.

        Args:
            timeout: seconds to wait until all is quiet.
        """
        timeout = arguments.seconds("timeout", timeout, zero=True)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = now() + timeout
        for read in self._reader.running():
            read.cancel()
        for read in self._reader.running():
            read.wait_quiet(max(0.0, deadline - now()))
        for shares in self._rank_reads:
            shares.close(max(0.0, deadline - now()))
        self._reader.close()
        self._checksummer.close()
        self._transport.close(max(0.0, deadline - now()))
        if self._agent is not None:
            self._agent.close()

    def is_rank(self, token: EngineToken, rank: int) -> bool:
        """Whether it is this rank of this start of the engine."""
        return (self._token.engine_id, self._token.incarnation, self.rank.rank) == (
            token.engine_id,
            token.incarnation,
            rank,
        )

    def register_again(self) -> None:
        """Refill a home that lost its record of this rank. Same content, so it changes nothing at one that has it.

        Raises:
            Unavailable: the node server cannot take it now. What it refuses for good is logged.
        """
        if self._closed:
            return
        try:
            self._register(5.0)
        except KvferryError as error:
            if error.retryable:
                raise
            message = "rank %d of engine %s was not registered again: %s"
            logger.warning(message, self.rank.rank, self.spec.engine_id, error)

    def _register(self, timeout: float) -> pb.RegisterCacheResponse:
        control: Control = self._homes.own
        what = f"the registration of rank {self.rank.rank} of engine {self.spec.engine_id!r} at {control.address}"
        return retrying(lambda left: control.register_cache(self._registration, left), now() + timeout, what=what)

    def _geometry(self, deadline: float) -> EngineGeometry:
        """The whole engine; asked for once, since an incarnation's geometry does not change."""
        if self.spec.num_ranks == 1:
            return EngineGeometry(
                self.spec.engine_id, self.spec.groups, (self.rank,), self.spec.identity, self._token.incarnation
            )
        with self._lock:
            whole = self._whole
        if whole is None:
            whole = whole_engine(self._homes.own, self._token.ref(), deadline)
            with self._lock:
                self._whole = whole
        return whole

    def _measure(self, rule: PathRule, home: str, agent: AgentInfo, deadline: float) -> PathRule | None:
        """The rule with constants measured from an agent behind this home; once, as its ranks are reached alike."""
        if self._staging.costs is not None:
            return None
        with self._lock:
            known = self._rules.get(home)
        if known is None:
            # The memory of a rank is of one kind, as far as costs go.
            plane = self.rank.planes[0]
            pool = self._transport.pool(plane.memory_kind, plane.device)
            costs = measure(self._transport, agent, pool, min(deadline, now() + MEASURE_TIMEOUT))
            if costs is None:
                return None
            known = replace(rule, costs=costs)
            with self._lock:
                self._rules[home] = known
        return known

    def _drop(self, peer: SourceEngine) -> None:
        for agent in peer.agents.values():
            self._transport.retire(agent.name)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the cache of rank {self.rank.rank} of engine {self.spec.engine_id!r} is closed")


def _agent_to_proto(agent: ServingAgent) -> geometry_pb2.Agent:
    info = agent.info
    return geometry_pb2.Agent(
        name=info.name,
        metadata=info.metadata,
        metadata_sha256=info.sha256,
        regions=[region_to_proto(region) for region in info.regions],
    )
