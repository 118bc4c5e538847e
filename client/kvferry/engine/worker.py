"""The port of one of an engine's workers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from kvferry import _arguments as arguments
from kvferry._cache import OPEN_TIMEOUT, Cache, runtime_of
from kvferry._client import CLOSE_TIMEOUT, Client, announce, discard, register_memory
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing
from kvferry._loop import News
from kvferry._memory.declared import Declared, describe
from kvferry._memory.rank_memory import Tails
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.runtime import LocalRank
from kvferry._wire.token import EngineToken
from kvferry.engine.values import Grant, GrantStep, Offer, RankEnd, WorkerOutput
from kvferry.errors import InvalidField, TransferCancelled, WrongState
from kvferry.geometry.tensors import Tensor

MAX_DONE = 65_536
"""Acknowledged reads (hours of them) that are remembered, to recognise a grant that is delivered again in seconds."""

MAX_EARLY = 4096
"""Number of reads that were not started whose steps are kept: as many as may wait at once by default."""


@dataclass(frozen=True)
class RegisterMemory(Declared):
    """The arguments of `WorkerPort.register_memory`: `kv_caches`, one tensor per layer, and those of `Declared`."""

    kv_caches: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Register(RegisterMemory):
    """The arguments of `WorkerPort.register`: those of `register_memory`, and the seconds to keep trying."""

    _: KW_ONLY
    timeout: float = OPEN_TIMEOUT


class WorkerPort(Closing):
    """The port of one worker: registers its rank's memory, and reads the rank's shares of granted reads.

    An engine whose workers get their memory before the token calls `register_memory` and, when the token comes,
    `announce`; others call `register`.

    Threading: every method may be called from any thread. All but `register`, `register_memory`, `announce`,
    `wait_news` and `close` return at once, and `prepare` unless it is given a time; RPCs and NIXL run on other threads
    (R11).

    Args:
        client: the client of this process, made after any fork. The port does not close it.
        spec: the engine; the same value as in its scheduler.
        rank: index of this rank.
        token: `SchedulerPort.token`; None if the scheduler's port uses the same client, or `announce` gets the token.
    """

    def __init__(
        self, client: Client, spec: EngineSpec, rank: int = 0, *, token: EngineToken | str | None = None
    ) -> None:
        self.spec = arguments.instance("spec", spec, EngineSpec, "an EngineSpec")
        self.rank = arguments.integer("rank", rank, 0, spec.num_ranks - 1)
        self._client = arguments.instance("client", client, Client, "a Client")
        self._token = token
        self._lock = threading.Lock()
        self._local: LocalRank | None = None
        self._cache: Cache | None = None
        self._reads: dict[str, RankRead] = {}
        self._steps = StepOrders()
        self._ends: dict[str, RankEnd] = {}
        self._quiesced: dict[str, None] = {}
        self._news = News()
        self._done: dict[str, bool] = {}
        """read_ids of acknowledged reads, the latest last: a grant that comes twice must not be read twice. True: the
        grant was cancelled before it came, and must never be read."""

    @arguments.takes(Register)
    def register(self, given: Register) -> Cache:
        """Register the rank's memory with NIXL and at the node server. Call this once, before the engine serves; it
        waits.

        Args:
            given: each field of `Register` and of `Declared` is an argument of its own: ``register(kv_caches,
                axes=axes, heads=range(2, 4), total_heads=4)``.

        Returns:
            The registered cache; also available as `cache`.

        Raises:
            WrongState: the rank is registered already.
            KvferryError: see `Client.register_cache`.
        """
        self._register_memory(given)
        try:
            return self.announce(timeout=given.timeout)
        except BaseException:
            # The rank may be registered again, with other arguments.
            local, self._local = self._local, None
            if local is not None:
                discard(self._client, local)
            raise

    @arguments.takes(RegisterMemory)
    def register_memory(self, given: RegisterMemory) -> None:
        """Register the rank's memory with NIXL, the part of `register` that needs no token. Call this once; it waits.

        Runs on the calling thread, with the device of the memory set. Arguments and errors: see `register`.
        """
        self._register_memory(given)

    def announce(self, token: EngineToken | str | None = None, *, timeout: float = OPEN_TIMEOUT) -> Cache:
        """Announce the registered memory to the node server, the other part of `register`. It waits. If this raises, it
        may be called again.

        Args:
            token: `SchedulerPort.token`; None: the token that the port was made with.
            timeout: seconds to keep trying.

        Raises:
            WrongState: no memory is registered, or it was announced already.
            Closed: the port or its client was closed.
            KvferryError: see `Client.register_cache`.
        """
        timeout = arguments.seconds("timeout", timeout)
        if self._cache is not None:
            raise self._wrong_state("was announced already: use WorkerPort.cache")
        if self._local is None:
            raise self._wrong_state("has no memory yet: call register_memory first")
        self._cache = announce(self._client, self._local, self._token if token is None else token, timeout)
        return self._cache

    @property
    def cache(self) -> Cache:
        """The registered cache, for calls that need no scheduler. Raises `WrongState` before `register`."""
        if self._cache is None:
            raise self._wrong_state()
        return self._cache

    def start(self, grant: Grant, *, tails: Tails = Tails.KEEP) -> None:
        """Start to read this rank's share of a grant. `finished` reports the end and all errors not listed here.

        Args:
            grant: the grant that `SchedulerPort.attach` returned. If it is not `complete`, `add_step` adds the other
                blocks of the source, and the share ends with the last.
            tails: whether the bytes of the local blocks behind the last token read are kept or cleared.

        Raises:
            HomeNotAllowed: this client may not connect to the source's home.
            WrongState: the argument is an `Offer`, to which no blocks were attached; the read was started already; or
                the rank is not registered. A grant that was cancelled before it came is ignored.
            InvalidField: an argument has the wrong type.
            Closed: the cache is closed.
        """
        # An offer that is decoded as a grant has no blocks, either.
        if isinstance(grant, Offer) and not getattr(grant, "local", ()):
            raise WrongState(
                f"request {grant.request_id!r} has no blocks to read into: attach() it first, and start the Grant that "
                "SchedulerPort.attach returns",
                request_id=grant.request_id,
            )
        arguments.instance("grant", grant, Grant, "the Grant that SchedulerPort.attach returned")
        runtime = runtime_of(self.cache)
        order = RankOrder(
            read_id=grant.read_id,
            request_id=grant.request_id,
            home=runtime.homes.get(arguments.text("home", grant.home)),
            engine_id=grant.engine_id,
            incarnation=grant.incarnation,
            publication=grant.publication,
            reference=grant.reference,
            lease=ReaderLease.without_end(grant.lease_id),
            granted=GrantedPart(
                blocks=grant.blocks(), complete=arguments.flag("complete", grant.complete), unfinished=grant.unfinished
            ),
            wanted=Wanted(
                blocks=grant.local_blocks(),
                tokens=arguments.token_range(grant.tokens),
                tails=arguments.instance("tails", tails, Tails, "a Tails"),
            ),
            deadline=runtime.loop.now() + arguments.seconds("timeout", grant.timeout, zero=True),
            traceparent=arguments.text("traceparent", grant.traceparent),
        )
        if order.wanted.tokens is None and not order.granted.complete:
            raise InvalidField("tokens", None, "the tokens to read, since the grant is not complete")
        with self._lock:
            if self._done.get(grant.read_id):
                return
            if grant.read_id in self._reads or grant.read_id in self._done:
                raise WrongState(
                    f"read {grant.read_id} of request {grant.request_id!r} was already started on rank {self.rank}: "
                    "start each grant once",
                    request_id=grant.request_id,
                    read_id=grant.read_id,
                )
            read = RankRead(runtime.loop, order)
            runtime.shares.start(read, self._share_ended, self._share_quiesced)
            self._reads[grant.read_id] = read
            self._pass_on(grant.read_id)

    def add_step(self, step: GrantStep) -> None:
        """Read the blocks that the source of a grant has published since. Idempotent.

        Their bytes move at once, as far as whole granules of both sides allow; the rest moves with the next step, and
        everything with the last. A step that comes before its grant, or before earlier steps, waits for them.

        Raises:
            InvalidField: the argument is not a `GrantStep`.
            WrongState: the rank is not registered.
        """
        arguments.instance("step", step, GrantStep, "a GrantStep, as SchedulerPort.grant_steps returned it")
        if self._cache is None:
            raise self._wrong_state()
        with self._lock:
            if step.read_id in self._done:
                return
            self._steps.put(step, self._reads)
            self._pass_on(step.read_id)

    def cancel(self, read_id: str) -> None:
        """Cancel this rank's share of a read. `finished` reports its end, also if the rank has no such share (any
        more): the first report, or the grant, may have been lost. `start` ignores a grant that comes later, so that no
        write to its blocks ever begins."""
        arguments.text("read_id", read_id)
        with self._lock:
            read = self._reads.get(read_id)
            if read is not None:
                runtime_of(self.cache).shares.cancel(read)
                return
            # Steps may have come ahead of its grant: an engine that gives up before it starts its reads, again and
            # again, would fill the memory with them.
            self._steps.forget(read_id)
            if read_id not in self._done:
                self._remember(read_id, refused=True)
            # The share has ended and was acknowledged, or it was never started: the rank does not write any more.
            message = f"read {read_id} was cancelled, and rank {self.rank} has no share of it"
            cancelled = TransferCancelled.__name__
            self._ends[read_id] = RankEnd(read_id, "", False, True, 0, error_name=cancelled, message=message)
            self._news.tell()

    def poll(self) -> WorkerOutput:
        """Return the reports that were not acknowledged yet. They stay until `acknowledge`, so that an engine without a
        scheduler process can combine the outputs of all ranks before any of them acts on it."""
        with self._lock:
            ended = tuple(end for end in self._ends.values() if end.ok)
            failed = tuple(end for end in self._ends.values() if not end.ok)
            return WorkerOutput(self.rank, ended, failed, tuple(self._quiesced))

    def acknowledge(self, output: WorkerOutput) -> None:
        """Drop the given reports, all or some of those that `poll` returned, from later results of `poll`.
        Idempotent."""
        arguments.instance("output", output, WorkerOutput, "a WorkerOutput, as poll gave it")
        with self._lock:
            for end in (*output.ended, *output.failed):
                known = self._ends.pop(end.read_id, None)
                if known is not None and known.quiet:
                    self._forget(end.read_id)
            for read_id in output.quiesced:
                self._quiesced.pop(read_id, None)
                self._forget(read_id)

    def finished(self) -> WorkerOutput:
        """Return the reports since the last call, for `SchedulerPort.collect`. Call this in every step."""
        output = self.poll()
        self.acknowledge(output)
        return output

    def wait_news(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until a share has ended or become quiet; return whether `finished` may have
        news. See `SchedulerPort.wait_news`."""
        return self._news.wait(arguments.seconds("timeout", timeout, zero=True))

    async def until_news(self, timeout: float) -> bool:
        """Wait like `wait_news`, in asyncio, on any event loop."""
        return await self._news.arrive(arguments.seconds("timeout", timeout, zero=True))

    def running(self) -> int:
        """Return the number of shares that have not ended."""
        with self._lock:
            return sum(not read.ended for read in self._reads.values())

    def prepare(self, timeout: float = 0.0) -> None:
        """Make the reading agents now, before or after `announce`; see `Cache.prepare`. Waits at most `timeout` seconds
        until they are made.

        Raises:
            WrongState: no memory is registered.
            NixlError, NixlMissing: the agents could not be made within the time. The next read tries again.
        """
        timeout = arguments.seconds("timeout", timeout, zero=True)
        if self._local is None:
            self.cache.prepare()
        else:
            self._local.transport.prepare(timeout)

    def warm(self, engine_reference: str, *, timeout: float = OPEN_TIMEOUT) -> Future[tuple[int, ...]]:
        """Connect to a source engine ahead of the first read; see `Cache.warm`."""
        return self.cache.warm(engine_reference, timeout=timeout)

    def close(self) -> None:
        """Cancel the shares and end the agents. Idempotent."""
        if self._cache is not None:
            self._cache.close()
        elif self._local is not None:
            self._local.close(CLOSE_TIMEOUT)

    def _register_memory(self, given: RegisterMemory) -> None:
        if self._local is not None:
            raise self._wrong_state(
                "is already registered by this WorkerPort: use its cache, or close it and make another port"
            )
        described = describe(self.spec, self.rank, given.kv_caches, given)
        self._local = register_memory(self._client, self.spec, *described, serve=given.serve)

    def _wrong_state(self, problem: str = "has no memory yet: call WorkerPort.register first") -> WrongState:
        engine_id, rank = self.spec.engine_id, self.rank
        return WrongState(f"rank {rank} of engine {engine_id!r} {problem}", engine_id=engine_id, rank=rank)

    def _pass_on(self, read_id: str) -> None:
        """Pass on the next steps of a read that was started. Called with the lock held."""
        read = self._reads.get(read_id)
        if read is not None:
            for step in self._steps.take(read_id):
                if step.lease_id:
                    # After a restart of its home, a lease has another id.
                    read.order.lease.lease_id = step.lease_id
                more = GrantedPart(step.blocks(), complete=step.last, unfinished=step.unfinished)
                runtime_of(self.cache).loop.call(partial(read.add, more))

    def _forget(self, read_id: str) -> None:
        """Forget a read that has ended, is quiet and was acknowledged. Called with the lock held."""
        self._steps.forget(read_id)
        if self._reads.pop(read_id, None) is not None:
            self._remember(read_id, refused=False)

    def _remember(self, read_id: str, *, refused: bool) -> None:
        self._done[read_id] = refused
        if len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]

    # These run on the client's event loop, or on a thread of the transport.

    def _share_ended(self, read: RankRead) -> None:
        order, error = read.order, read.error
        end = RankEnd(order.read_id, order.request_id, error is None, read.quiet, read.bytes, work=read.work)
        if error is not None:
            end = replace(
                end,
                lost={name: tuple(blocks.ids.tolist()) for name, blocks in order.wanted.blocks.items()},
                error_name=type(error).__name__,
                message=error.message,
                values=dict(error.values),
                retry_after=error.retry_after,
            )
        with self._lock:
            self._ends[order.read_id] = end
            self._news.tell()

    def _share_quiesced(self, read: RankRead) -> None:
        with self._lock:
            self._quiesced[read.order.read_id] = None
            self._news.tell()


class StepOrders:
    """The steps of a worker's reads, in order, in whatever order they come. Not thread-safe."""

    def __init__(self) -> None:
        self._ahead: dict[str, dict[int, GrantStep]] = {}
        """By read_id, the steps that came early, by index."""
        self._taken: dict[str, int] = {}
        """By read_id, the index of the last step that was taken; none: 0, the grant."""

    def put(self, step: GrantStep, started: Collection[str]) -> None:
        """Add a step; a repeated step is ignored. Besides the `started` reads (read_ids), only the latest `MAX_EARLY`
        are kept."""
        ahead = self._ahead.setdefault(step.read_id, {})
        if step.index > self._taken.get(step.read_id, 0):
            ahead.setdefault(step.index, step)
        if len(self._ahead) > len(started) + MAX_EARLY:
            self.forget(next(read_id for read_id in self._ahead if read_id not in started))

    def take(self, read_id: str) -> list[GrantStep]:
        """Return the steps of a read that are next, each once."""
        ahead, found = self._ahead.setdefault(read_id, {}), list[GrantStep]()
        while (step := ahead.pop(self._taken.get(read_id, 0) + 1, None)) is not None:
            self._taken[read_id] = step.index
            found.append(step)
        return found

    def forget(self, read_id: str) -> None:
        self._ahead.pop(read_id, None)
        self._taken.pop(read_id, None)
