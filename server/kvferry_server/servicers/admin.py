"""The service `kvferry.v1.Admin`: operations on a home, each of which is written to the audit log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kvferry._clock import to_duration
from kvferry.errors import InvalidField, KvferryError, LeaseEnded
from kvferry.v1 import admin_pb2 as apb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.admin_pb2_grpc import AdminServicer
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, encode
from kvferry_server.servicers.callers import Context, NamesOf, caller
from kvferry_server.servicers.limits import MAX_TEXT

audit = logging.getLogger("kvferry_server.audit")
"""A line for each call of an operator: the caller, the named objects and the result."""


class Admin(AdminServicer):
    """The service of one home. Runs on the home's event loop. `drain` makes the whole node server take no new work, the
    home included (None: there is only the home)."""

    def __init__(self, home: Home, drain: Callable[[], Awaitable[None]] | None, names_of: NamesOf) -> None:
        self._home = home
        self._drain = drain
        self._names_of = names_of

    async def Drain(self, request: apb.DrainRequest, context: Context) -> apb.DrainResponse:
        home = self._home
        with self._audited("Drain", context):
            epoch = checks.random_bytes("home_epoch", request.home_epoch)
            if epoch != home.epoch:
                expected = f"{home.epoch.hex()}, this start of the node server"
                raise InvalidField("home_epoch", epoch.hex(), expected)
            if self._drain is not None:
                await self._drain()
            home.drain()
            with home.turn():
                leases, remaining = home.records.live_leases()
        return apb.DrainResponse(home_epoch=home.epoch, leases=leases, leases_remaining=to_duration(remaining))

    async def EndLease(self, request: apb.EndLeaseRequest, context: Context) -> apb.EndLeaseResponse:
        home = self._home
        with self._audited("EndLease", context, request.source, lease_number=request.lease_number):
            epoch = checks.random_bytes("home_epoch", request.home_epoch)
            source = checks.engine_ref("source", request.source)
            number = checks.positive("lease_number", request.lease_number)
            if epoch != home.epoch:
                problem = f"lease {number} is of another start of the node server, {epoch.hex()}: it has ended"
                raise LeaseEnded(problem, lease_number=number)
            with home.turn() as now:
                lease = home.lessor.revoke(source, number)
        return apb.EndLeaseResponse(
            home_epoch=home.epoch,
            state=pb.ReadState.ValueType(lease.state),
            remaining=to_duration(lease.remaining(now)),
        )

    async def AbortPublication(
        self, request: apb.AbortPublicationRequest, context: Context
    ) -> apb.AbortPublicationResponse:
        home = self._home
        with self._audited("AbortPublication", context, request.source, publication=request.publication):
            source = checks.engine_ref("source", request.source)
            number = checks.positive("publication", request.publication)
            with home.turn() as now:
                home.engines.find(source)
                publication = home.sources.withdraw(source, number)
        return apb.AbortPublicationResponse(
            home_epoch=home.epoch,
            state=encode.request_state(publication),
            leases=len(publication.leases),
            leases_remaining=to_duration(max((lease.remaining(now) for lease in publication.leases), default=0.0)),
        )

    async def EvictEngine(self, request: apb.EvictEngineRequest, context: Context) -> apb.EvictEngineResponse:
        home = self._home
        with self._audited("EvictEngine", context, request.engine):
            engine = checks.engine_ref("engine", request.engine)
            with home.turn():
                home.engines.evict(engine)
                leases, remaining = home.records.live_leases(engine)
        return apb.EvictEngineResponse(home_epoch=home.epoch, leases=leases, leases_remaining=to_duration(remaining))

    @contextmanager
    def _audited(
        self, method: str, context: Context, engine: pb.EngineRef | None = None, **values: object
    ) -> Iterator[None]:
        """Write a call's result to the audit log. The guard refuses callers without the role admin before this."""
        if engine is not None:
            # Cut to their right lengths: callers may send anything.
            named = {"engine_id": engine.engine_id[:MAX_TEXT], "incarnation": engine.incarnation[:16].hex()}
            values = {**named, **values}
        result = "INTERNAL"
        try:
            yield
            result = "OK"
        except KvferryError as error:
            result = error.reason
            raise
        finally:
            shown = "".join(f" {name}={value!r}" for name, value in values.items())
            who = caller(context, self._names_of(context))
            level = logging.INFO if result == "OK" else logging.WARNING
            audit.log(level, "%s by %s%s: %s", method, who, shown, result)
