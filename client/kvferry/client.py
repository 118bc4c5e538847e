"""The synchronous client: for engine processes, which fork, and whose steps must not wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from kvferry.cache import OPEN_TIMEOUT, Cache
from kvferry.channel import TlsConfig
from kvferry.clock import now
from kvferry.control import CALL_TIMEOUT, retrying
from kvferry.errors import Closed, ForkedClient, InvalidField
from kvferry.geometry import MemoryRegion, Plane, RankGeometry
from kvferry.homes import Homes
from kvferry.integrity import IntegrityOptions
from kvferry.lease_holder import LeaseHolder
from kvferry.nixl_options import NixlOptions
from kvferry.reference import parse_reference
from kvferry.renewals import Renewals
from kvferry.session import EngineSession
from kvferry.spec import EngineSpec, EngineToken
from kvferry.staging import StagingOptions
from kvferry.tensors import Holding, Tensor, planes_of, regions_of
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.watching import Watcher


class Client:
    """A process's way to its node server, and through it to every source.

    Nothing is connected or started before it is needed, and every method may be called from any thread. A client does
    not survive a
    fork: a child gets `ForkedClient` and makes its own.

    Args:
        address: the node server, ``unix:/path`` or ``host:port``.
        tls: credentials for TCP connections.
        allowed_homes: shell patterns of ``host:port`` that references may name without TLS, beside loopback.
        options: NIXL's.
        staging: how small pieces are read.
        integrity: whether what is published is summed, and what is read compared; off by default.
        max_reads: reads at once per cache.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        allowed_homes: Sequence[str] = (),
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        max_reads: int = 256,
    ) -> None:
        if max_reads < 1:
            raise InvalidField("max_reads", max_reads, "at least 1")
        self._pid = os.getpid()
        self._homes = Homes(address, tls, allowed_homes)
        self._renewals = Renewals()
        self._options = options or NixlOptions()
        self._staging = staging or StagingOptions()
        self._integrity = integrity or IntegrityOptions()
        self._max_reads = max_reads
        self._lock = threading.Lock()
        self._sessions: dict[str, EngineSession] = {}
        self._caches: list[Cache] = []
        self._watchers: list[Watcher] = []
        self._closed = False

    def open_engine(self, spec: EngineSpec, *, timeout: float = OPEN_TIMEOUT) -> EngineSession:
        """Start a new incarnation of an engine. In one process of the engine: its scheduler, or rank 0 where there is
        none.

        Args:
            spec: the engine.
            timeout: seconds to keep trying, e.g. while a predecessor of the same engine_id still counts as alive.

        Raises:
            EngineIdInUse: another incarnation lives.
            Unavailable: the node server could not be reached.
        """
        self._check_open()
        session = EngineSession(self._homes.own, spec, timeout)
        with self._lock:
            self._sessions[spec.engine_id] = session
        self._homes.known_as(session.advertise)
        return session

    def register_cache(
        self,
        engine: EngineSpec,
        rank: int = 0,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        axes: Sequence[str] | None = None,
        holding: Holding | None = None,
        planes: Sequence[Plane] | None = None,
        regions: Sequence[MemoryRegion] | None = None,
        keep: object = None,
        labels: Mapping[str, int] | None = None,
        token: EngineToken | str | None = None,
        serve: bool = True,
        timeout: float = OPEN_TIMEOUT,
    ) -> Cache:
        """Register a rank's cache: with NIXL in this process, and at the node server.

        The memory is said in one of three ways: `tensors` with the names of their `axes`, for an engine of one group;
        `tensors` with `planes` made of them by `kvferry.formats`; or `planes` and `regions` from plain addresses.

        Args:
            engine: the engine.
            rank: index of this rank.
            tensors: a tensor per layer, or whatever the planes were made of; kept referenced.
            axes: their axes, e.g. ``("kv", "block", "head", "token", "content")``; None: pages move whole.
            holding: which heads and tokens they hold; None: all of the model.
            planes: what the rank holds.
            regions: the memory that the planes lie in.
            keep: kept referenced as long as the cache is.
            labels: tp_rank, pp_rank ... for people and tools.
            token: from the process that opened the engine; None: opened by this client, or, for an engine of one rank,
                opened now.
            serve: whether others may read this cache; a rank that only reads saves an agent.
            timeout: seconds to keep trying.

        Raises:
            BadGeometry: planes that contradict the engine's groups or lie outside the regions.
            InvalidField: the memory is said in no way, or in two.
            CacheDiffers: the rank is registered with another content.
            Unavailable: the node server could not be reached.
        """
        self._check_open()
        deadline = now() + timeout
        found, ranges = _memory(engine, tensors, axes, holding, planes, regions)
        session, own = self._identity(engine, token, timeout)
        if session is None:
            self._watch(own, rank, timeout)
        cache = Cache(
            self._homes,
            self._renewals,
            engine,
            own,
            RankGeometry(rank, found, dict(labels or {})),
            ranges,
            serve=serve,
            options=self._options,
            staging=self._staging,
            integrity=self._integrity,
            tensors=tuple((tensors or {}).values()),
            max_reads=self._max_reads,
            session=session,
            timeout=deadline - now(),
            check_process=self._check_open,
            keep=(tensors, keep),
        )
        if session is not None:
            session.on_refill(cache.register_again)
        with self._lock:
            self._caches.append(cache)
        return cache

    def lease_holder(self, session: EngineSession) -> LeaseHolder:
        """For the one process of an engine that holds the leases of all its ranks' reads."""
        self._check_open()
        return LeaseHolder(self._homes, self._renewals, session.token)

    def decline(self, reference: str, *, timeout: float = CALL_TIMEOUT) -> None:
        """Say that nobody will read a publication: its source gets the blocks back now, not when the hold ends."""
        self._check_open()
        home = self._homes.get(parse_reference(reference).home)
        request = pb.NotifyRequest(notifications=[pb.Notification(decline=pb.Decline(reference=reference))])
        retrying(lambda left: home.notify_one(request, left), now() + timeout)

    def close(self) -> None:
        """Cancel reads, end agents, sessions and connections. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            caches, sessions, watchers = self._caches, list(self._sessions.values()), self._watchers
        for cache in caches:
            cache.close()
        for session in sessions:
            session.close()
        for watcher in watchers:
            watcher.close()
        self._renewals.close()
        self._homes.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _identity(
        self, spec: EngineSpec, token: EngineToken | str | None, timeout: float
    ) -> tuple[EngineSession | None, EngineToken]:
        """The session if this process has it, and the token of the engine."""
        given = EngineToken.parse(token) if isinstance(token, str) else token
        with self._lock:
            session = self._sessions.get(spec.engine_id)
        if session is not None and (given is None or given == session.token):
            return session, session.token
        if given is not None:
            if given.engine_id != spec.engine_id:
                raise InvalidField("token", given.engine_id, f"the token of engine {spec.engine_id!r}")
            return None, given
        if spec.num_ranks > 1:
            raise InvalidField("token", None, f"the token of engine {spec.engine_id!r}, which has several ranks")
        session = self.open_engine(spec, timeout=timeout)
        return session, session.token

    def _watch(self, token: EngineToken, rank: int, timeout: float) -> None:
        """This process's liveness, where the scheduler's Watch is another process's."""
        request = pb.WatchRequest(
            engine=token.ref(),
            session_secret=token.session_secret,
            role=pb.WATCH_ROLE_RANK,
            rank=rank,
            home=token.home,
        )

        def on_event(message: pb.WatchResponse) -> None:
            if message.WhichOneof("event") == "synced" and message.synced.need_resync:
                with self._lock:
                    caches = [cache for cache in self._caches if cache.rank.rank == rank]
                for cache in caches:
                    cache.register_again()

        watcher = Watcher(self._homes.own, request, on_event, f"{token.engine_id}-{rank}")
        opened = watcher.open(timeout)
        self._homes.known_as(opened.advertise)
        with self._lock:
            self._watchers.append(watcher)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"this client was made in process {self._pid}; process {os.getpid()} must make its own",
                made_in=self._pid,
                used_in=os.getpid(),
            )
        if self._closed:
            raise Closed("the client is closed")


def _memory(
    engine: EngineSpec,
    tensors: Mapping[str, Tensor] | None,
    axes: Sequence[str] | None,
    holding: Holding | None,
    planes: Sequence[Plane] | None,
    regions: Sequence[MemoryRegion] | None,
) -> tuple[tuple[Plane, ...], tuple[MemoryRegion, ...]]:
    """The planes and regions of a rank, from whichever of its arguments say them."""
    if tensors is None:
        if planes is None or regions is None:
            raise InvalidField("planes", planes, "tensors, or planes with the regions that they lie in")
        return tuple(planes), tuple(regions)
    if regions is not None:
        raise InvalidField("regions", len(regions), "nothing: tensors say where they lie")
    if planes is None:
        if len(engine.groups) != 1:
            names = [group.name for group in engine.groups]
            raise InvalidField("planes", None, f"planes that say which of the groups {names} they belong to")
        planes = planes_of(tensors, axes, engine.groups[0], holding=holding)
    elif axes is not None or holding is not None:
        raise InvalidField("axes", axes, "nothing: the planes say what the tensors hold")
    return tuple(planes), regions_of(tensors.values())
