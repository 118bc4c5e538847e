"""The synchronous client, for the processes of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from kvferry import _arguments as arguments
from kvferry._cache import OPEN_TIMEOUT, Cache, runtime_of
from kvferry._control.backoff import CALL_TIMEOUT, retrying
from kvferry._control.home_session import HomeSession
from kvferry._control.homes import Homes
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import PromptCheck
from kvferry._control.watcher import Watcher, rank_watcher
from kvferry._directory.directory import Directory
from kvferry._directory.opening import open_directory
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing
from kvferry._integrity.summed_blocks import IntegrityOptions
from kvferry._loop import Loop
from kvferry._memory.declared import Declared, describe
from kvferry._memory.rank_memory import RankMemory
from kvferry._network import network_of
from kvferry._reads.runtime import ClientRuntime, LocalRank, RankRuntime
from kvferry._session import EngineSession, home_session_of
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._wire.channel import TlsConfig, parse_address
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken, engine_ref
from kvferry.errors import CacheDiffers, Closed, InvalidField, WrongState
from kvferry.geometry.model import RankGeometry
from kvferry.geometry.tensors import Tensor
from kvferry.stats import ClientStats, SourceStats, total

CLOSE_TIMEOUT = 10.0
"""Seconds for ending the agents of memory that was never announced."""


@dataclass(frozen=True)
class RegisterCache(Declared):
    """The arguments of `Client.register_cache`: those of `Declared`, and these:

    Attributes:
        engine: the engine.
        rank: index of this rank.
        tensors: one tensor per layer, or the tensors that the planes describe. The cache keeps them referenced.
        token: the token from the process that opened the engine. None: this client has opened the engine, or opens it
            now if it has one rank.
        timeout: seconds to keep trying.
    """

    engine: EngineSpec
    rank: int = 0
    _: KW_ONLY
    tensors: Mapping[str, Tensor] | None = None
    token: EngineToken | str | None = field(default=None, repr=False)
    timeout: float = OPEN_TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.instance("engine", self.engine, EngineSpec, "an EngineSpec")
        object.__setattr__(self, "rank", arguments.integer("rank", self.rank, 0))
        object.__setattr__(self, "timeout", arguments.seconds("timeout", self.timeout))


class Client(Closing):
    """Connects a process to the node server of its node, and to the homes of the engines that it reads from.

    Connections are opened and threads started when they are first needed. A client cannot be used after a fork: in the
    child, every call raises `ForkedClient`, and the child makes its own client.

    Threading: every method may be called from any thread. Calls with a `timeout` wait, and so does `close`.

    Args:
        address: address of the node server, ``unix:/path`` or ``host:port``.
        tls: credentials for TCP connections.
        allowed_homes: shell patterns of the ``host:port`` of homes that this client may connect to without TLS. Its own
            node server and loopback addresses are always allowed.
        options: options of NIXL.
        staging: when and how small pieces are read by way of staging memory.
        integrity: whether published blocks are summed, and blocks that were read are compared with the sums; off by
            default.
        prompt_check: how the marks of a publication's prompt are checked. "compare": reads of another prompt are
            refused; reads without marks are accepted, and counted. "require": reads without marks are refused, too.
            "off": nothing is compared. See docs/guarantees.md.
        optimistic: put the blocks of publications that are complete into their references, and read from such
            references without a lease: the home is asked once, after the last byte, whether the bytes count. A read
            that takes longer than a moment gets a lease all the same.

    Raises:
        InvalidField: an argument has the wrong type, or the address has another form, e.g. ``http://host:port``.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        allowed_homes: Sequence[str] = (),
        directory: str | None = None,
        home_in_references: bool = True,
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        prompt_check: str = PromptCheck.COMPARE.value,
        optimistic: bool = True,
    ) -> None:
        for name, given, kind in (
            ("tls", tls, TlsConfig),
            ("options", options, NixlOptions),
            ("staging", staging, StagingOptions),
            ("integrity", integrity, IntegrityOptions),
        ):
            if given is not None:
                arguments.instance(name, given, kind, f"a {kind.__name__}")
        parse_address(arguments.text("address", address))
        network = self._network = network_of(address)
        staging = staging or StagingOptions()
        allowed = arguments.texts("allowed_homes", allowed_homes)
        self._home_in_references = arguments.flag("home_in_references", home_in_references)
        self._directory = open_directory(directory) if directory else None
        self._loop = Loop(clock=network.clock)
        if network.looping is not None:
            network.looping(self._loop)
        self._homes = Homes(address, self._loop, tls, allowed, network.dial, self._directory)
        self._runtime = ClientRuntime(
            loop=self._loop,
            homes=self._homes,
            renewals=Renewals(self._loop),
            binding=network.binding,
            options=options or NixlOptions(),
            staging=replace(staging, costs=staging.costs or network.costs),
            integrity=integrity or IntegrityOptions(),
            prompt_check=arguments.choice("prompt_check", prompt_check, PromptCheck),
            optimistic=arguments.flag("optimistic", optimistic),
        )
        self._lock = threading.Lock()
        self._sessions: list[EngineSession] = []
        """Of an engine that was opened again, the last is the present one."""
        self._caches: list[Cache] = []
        self._locals: list[LocalRank] = []
        """The ranks whose memory is registered with NIXL, whether they have caches yet or not."""
        self._watchers: dict[tuple[EngineToken, int], Watcher] = {}
        self._closed = False

    def open_engine(self, spec: EngineSpec, *, timeout: float = OPEN_TIMEOUT) -> EngineSession:
        """Start a new incarnation of an engine, and open its session.

        Call this in one process of the engine: its scheduler, or rank 0 if it has no scheduler.

        Args:
            spec: the engine.
            timeout: seconds to keep trying, e.g. while a predecessor of the same engine_id still counts as alive.

        Raises:
            EngineIdInUse: another incarnation of the engine is alive.
            Unavailable: the node server could not be reached.
        """
        self._check_open()
        arguments.instance("spec", spec, EngineSpec, "an EngineSpec")
        timeout = arguments.seconds("timeout", timeout)
        self._homes.discover()
        opened = HomeSession(
            self._loop,
            self._homes.own,
            spec,
            home_in_references=self._home_in_references,
            hints=self._runtime.optimistic,
        )
        self._loop.run(opened.open(timeout))
        session = EngineSession(opened)
        self._keep(lambda: self._sessions.append(session), session.close)
        self._homes.known_as(opened.advertise)
        return session

    @arguments.takes(RegisterCache)
    def register_cache(self, given: RegisterCache) -> Cache:
        """Register a rank's cache with NIXL in this process and at the node server.

        Args:
            given: each field of `RegisterCache` is an argument of its own, and so is each of `Declared`:
                ``register_cache(engine, rank, tensors=tensors, axes=axes, heads=range(2, 4), total_heads=4)``.

        Raises:
            BadGeometry: the planes contradict the engine's groups, lie over each other, or lie outside the regions; or
                this is the last rank, and the ranks together lack heads or tokens (`EngineSpec.partial`).
            InvalidField: the memory is described in no way or in two ways, is not mapped, or is read-only; or a rank of
                several does not declare its heads.
            WrongState: this process has registered the rank already.
            CacheDiffers: another process has registered the rank with different content.
            Unavailable: the node server could not be reached.
        """
        self._check_open()
        engine, timeout = given.engine, given.timeout
        deadline = self._loop.now() + timeout
        described = describe(engine, given.rank, given.tensors, given)
        self._homes.discover()
        identity = self._identity(engine, given.token, timeout)
        local = register_memory(self, engine, *described, serve=given.serve)
        try:
            return self._announce(local, *identity, deadline)
        except BaseException:
            discard(self, local)
            raise

    def decline(self, reference: str, *, timeout: float = CALL_TIMEOUT) -> None:
        """Decline a publication at its home: it will not be read. The source then gets its blocks back at once, and not
        only when the hold ends.

        Args:
            reference: the publication's reference. A router's reference may be declined before its publication comes:
                reads that wait for the publication end, and it is released at once when it comes.
            timeout: seconds to keep trying.

        Raises:
            BadReference, HomeNotAllowed: see `Cache.read`.
            EngineNotListed, DirectoryUnavailable: the reference names no home, and the directory does not list its
                engine.
            KvferryError: the home refused, or could not be reached.
        """
        self._check_open()
        timeout = arguments.seconds("timeout", timeout)
        self._homes.discover()
        home = self._homes.of(parse_reference(reference))
        self._loop.run(retrying(lambda left: home.decline(reference, left), self._loop.now() + timeout))

    @property
    def directory(self) -> Directory | None:
        """The directory that the client was given; None: it was given none. Belongs to the client, which closes it."""
        return self._directory

    def stats(self) -> ClientStats:
        """Return the counts and measurements of this client, its ports and caches included. Makes no RPC. After
        `close`, totals stay unchanged."""
        with self._lock:
            sessions = tuple(self._sessions)
            transports = [rank.transport for rank in self._locals]
        return ClientStats(
            reads=self._runtime.reads.stats(),
            ranks=self._runtime.shares.stats(transport.gauges() for transport in transports),
            source=total(SourceStats, [home_session_of(session).stats() for session in sessions]),
            calls=self._homes.stats(),
        )

    def close(self) -> None:
        """Cancel the reads, and end NIXL agents, sessions (see `EngineSession.close`) and connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            # From now on `_keep` adds nothing.
            self._closed = True
        for cache in self._caches:
            cache.close()
        for rank in tuple(self._locals):
            # Others ended with their caches.
            if not rank.closed:
                rank.close(CLOSE_TIMEOUT)
        for session in self._sessions:
            session.close()
        for watcher in self._watchers.values():
            self._loop.run(watcher.close())
        if self._directory is not None:
            self._directory.close()
        if self._loop.started:
            self._loop.call(self._runtime.renewals.close)
            self._loop.call(self._homes.close)
        else:
            # No thread is needed for that, and the system may have none.
            self._homes.close()
        self._loop.close()
        self._homes.join(CLOSE_TIMEOUT)

    def _announce(self, local: LocalRank, session: EngineSession | None, own: EngineToken, deadline: float) -> Cache:
        """Announce registered memory to the node server. May be repeated after an error."""
        engine, rank = local.spec, local.rank.rank
        local.check_open()
        if session is None:
            self._watch(own, rank, deadline - self._loop.now())
        runtime = RankRuntime(self._runtime, local, own)
        try:
            reuse_after = self._loop.run(runtime.register(deadline - self._loop.now()))
        except CacheDiffers as error:
            runtime.abandon()
            with self._lock:
                known = [runtime_of(cache) for cache in self._caches]
            if not any(each.rank.rank == rank and engine_ref(each.token) == engine_ref(own) for each in known):
                raise
            raise WrongState(
                f"rank {rank} of engine {engine.engine_id!r} is already registered by this process: use the Cache that "
                "register_cache returned the first time; other memory needs another start of the engine",
                engine_id=engine.engine_id,
                rank=rank,
            ) from error
        except BaseException:
            runtime.abandon()
            raise
        cache = Cache(runtime, session, reuse_after)
        if session is not None:
            home_session_of(session).on_refill(runtime.register_again)
        self._keep(lambda: self._caches.append(cache), cache.close)
        if local.closed:
            cache.close()
        local.check_open()
        return cache

    def _identity(
        self, spec: EngineSpec, token: EngineToken | str | None, timeout: float
    ) -> tuple[EngineSession | None, EngineToken]:
        """Return the engine's session, or None if another process has it, and the engine's token."""
        given = EngineToken.parse(token) if isinstance(token, str) else token
        if given is not None:
            arguments.instance("token", given, EngineToken, "an EngineToken, or its string")
        with self._lock:
            found = [session for session in self._sessions if session.spec.engine_id == spec.engine_id]
        session = found[-1] if found else None
        if session is not None and (given is None or given == session.token):
            return session, session.token
        if given is not None:
            if given.engine_id != spec.engine_id:
                raise InvalidField("token", given.engine_id, f"the token of engine {spec.engine_id!r}")
            return None, given
        if spec.num_ranks > 1:
            raise InvalidField(
                "token",
                None,
                f"the token of engine {spec.engine_id!r}, which has several ranks: pass token=SchedulerPort.token",
            )
        session = self.open_engine(spec, timeout=timeout)
        return session, session.token

    def _watch(self, token: EngineToken, rank: int, timeout: float) -> None:
        """Open the Watch of a rank, unless it is open: for processes without the engine's session, see
        `rank_watcher`."""
        with self._lock:
            known = self._watchers.get((token, rank))
        # A Watch that has ended for good, e.g. because another process took it over, keeps no registration alive.
        if known is not None and known.failure is None:
            return

        async def register_again() -> None:
            with self._lock:
                caches = [cache for cache in self._caches if cache.rank.rank == rank]
            for cache in caches:
                await runtime_of(cache).register_again()

        watcher = rank_watcher(self._loop, self._homes.own, token, rank, register_again)
        opened = self._loop.run(watcher.open(timeout))
        self._homes.known_as(opened.advertise)
        self._keep(lambda: self._watchers.update({(token, rank): watcher}), lambda: self._loop.run(watcher.close()))

    def _keep(self, keep: Callable[[], object], end: Callable[[], object]) -> None:
        """Record an object that `close` ends. If `close` has run in the meantime, without it, end the object, and raise
        `Closed`."""
        with self._lock:
            late = self._closed
            if not late:
                keep()
        if late:
            end()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")


def client_runtime_of(client: Client) -> ClientRuntime:
    """Return the internal runtime behind a client, for the rest of kvferry. Raises `Closed`."""
    client._check_open()
    return client._runtime


def register_memory(
    client: Client, engine: EngineSpec, rank: RankGeometry, memory: RankMemory, *, serve: bool
) -> LocalRank:
    """Do the part of `Client.register_cache` that needs no token: register a rank's memory with NIXL, on the calling
    thread. Makes no RPC."""
    client._check_open()
    local = LocalRank(client._runtime, engine, rank, memory, serve=serve)
    client._keep(lambda: client._locals.append(local), lambda: local.close(0.0))
    return local


def announce(client: Client, local: LocalRank, token: EngineToken | str | None, timeout: float) -> Cache:
    """Do the other part of `Client.register_cache`, for the rest of kvferry. May be repeated after an error."""
    client._check_open()
    deadline = client._loop.now() + timeout
    return client._announce(local, *client._identity(local.spec, token, timeout), deadline)


def discard(client: Client, local: LocalRank) -> None:
    """End the rank that `register_memory` returned, and release its memory."""
    local.close(0.0)
    with client._lock:
        if local in client._locals:
            client._locals.remove(local)
