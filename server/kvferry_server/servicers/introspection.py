"""`kvferry.v1.Introspection`: what operators and tools ask. Reads the home; changes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from kvferry.codec import engine_from_proto, engine_to_proto
from kvferry.errors import InvalidField, LimitReached
from kvferry.explain import plan_to_proto
from kvferry.geometry import EngineGeometry
from kvferry.plan import plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionServicer
from kvferry_server.engines import Engine
from kvferry_server.home import Home
from kvferry_server.identity import EngineRef
from kvferry_server.leases import Lease
from kvferry_server.publications import Publication, Stage
from kvferry_server.servicers import checks, encode
from kvferry_server.servicers.paging import Key, number_key, page, text_key

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PLAN_SECONDS = 5
"""For the ranks of one PlanRead together: a tool may ask for engines that take minutes."""


class Introspection(IntrospectionServicer):
    """The service over one home, on the home's event loop."""

    def __init__(self, home: Home) -> None:
        self._home = home
        # A thread of its own: a tool's big questions must not take those of handshakes.
        self._planner = ThreadPoolExecutor(1, "kvferry-plan")

    async def ListEngines(self, request: ipb.ListEnginesRequest, context: Context) -> ipb.ListEnginesResponse:
        """See the contract."""
        home = self._home
        with home.turn():
            engines, summary = home.engines.engines(), self._summary()
            summaries, token = page(engines, _engine_key, summary, request.page_size, request.page_token)
        return ipb.ListEnginesResponse(home_epoch=home.epoch, engines=summaries, next_page_token=token)

    async def GetEngine(self, request: ipb.GetEngineRequest, context: Context) -> ipb.GetEngineResponse:
        """See the contract."""
        home = self._home
        engine_id = checks.text("engine_id", request.engine_id)
        with home.turn():
            engine = home.engines.find_live(engine_id)
            summary = self._summary()(engine)
        geometry = geometry_pb2.EngineGeometry(engine_id=engine_id, incarnation=engine.ref.incarnation)
        if engine.first is not None:
            found = engine.geometry
            size = sum(len(rank.planes) for rank in found.ranks) * encode.PLANE_BYTES
            geometry = await checks.offloaded(size, lambda: engine_to_proto(found))
        return ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary, geometry=geometry)

    async def ListRequests(self, request: ipb.ListRequestsRequest, context: Context) -> ipb.ListRequestsResponse:
        """See the contract."""
        home = self._home
        wanted = checks.text("engine_id", request.engine_id, least=0)
        with home.turn() as now:
            found = (one for one in home.lessor.publications() if wanted in ("", one.source.engine_id))
            summary = partial(encode.request_summary, now=now)
            summaries, token = page(found, _publication_key, summary, request.page_size, request.page_token)
        return ipb.ListRequestsResponse(home_epoch=home.epoch, requests=summaries, next_page_token=token)

    async def ListTransfers(self, request: ipb.ListTransfersRequest, context: Context) -> ipb.ListTransfersResponse:
        """See the contract."""
        home = self._home
        wanted = checks.text("engine_id", request.engine_id, least=0)
        with home.turn() as now:
            found = (one for one in home.lessor.leases() if wanted in ("", one.publication.source.engine_id))
            summary = partial(encode.transfer_summary, now=now)
            summaries, token = page(found, _lease_key, summary, request.page_size, request.page_token)
        return ipb.ListTransfersResponse(home_epoch=home.epoch, transfers=summaries, next_page_token=token)

    async def PlanRead(self, request: ipb.PlanReadRequest, context: Context) -> ipb.PlanReadResponse:
        """See the contract."""
        source = self._geometry("source", request.source_engine_id, request)
        destination = self._geometry("destination", request.destination_engine_id, request)

        left = threading.Event()

        def answer() -> ipb.PlanReadResponse:
            until = time.monotonic() + PLAN_SECONDS
            read_from = source or engine_from_proto(request.source_geometry)
            read_into = destination or engine_from_proto(request.destination_geometry)
            ranks = sorted(set(request.ranks)) or [rank.rank for rank in read_into.ranks]
            response = ipb.PlanReadResponse(home_epoch=self._home.epoch)
            for rank in ranks:
                if left.is_set() or time.monotonic() > until:
                    message = f"planning {len(ranks)} ranks takes longer than {PLAN_SECONDS} s; ask for fewer"
                    raise LimitReached(message, limit="plan_seconds", value=PLAN_SECONDS)
                response.ranks.append(plan_to_proto(plan_read(read_from, read_into, rank)))
            return response

        try:
            return await asyncio.get_running_loop().run_in_executor(self._planner, answer)
        finally:
            # A thread cannot be cancelled; it looks whether somebody still waits for it.
            left.set()

    def _geometry(self, side: str, engine_id: str, request: ipb.PlanReadRequest) -> EngineGeometry | None:
        """Geometry of an engine here; None if the request brings one."""
        given = request.WhichOneof("source" if side == "source" else "destination")
        if given is None:
            raise InvalidField(side, None, "an engine_id or a geometry")
        if given == f"{side}_geometry":
            return None
        checks.text(f"{side}_engine_id", engine_id)
        with self._home.turn():
            engine = self._home.engines.find_live(engine_id)
            self._home.engines.check_readable(engine)
            return engine.geometry

    def _summary(self) -> Callable[[Engine], ipb.EngineSummary]:
        """What makes a line of an engine, counted now."""
        publications: Counter[EngineRef] = Counter()
        leases: Counter[EngineRef] = Counter()
        for publication in self._home.lessor.publications():
            publications[publication.source] += publication.stage is not Stage.RELEASED
        for lease in self._home.lessor.leases():
            leases[lease.publication.source] += lease.live
        return lambda engine: encode.engine_summary(engine, publications[engine.ref], leases[engine.ref])


def _engine_key(engine: Engine) -> Key:
    return text_key(engine.ref.engine_id), engine.ref.incarnation


def _publication_key(publication: Publication) -> Key:
    source = publication.source
    return text_key(source.engine_id), source.incarnation, number_key(publication.number)


def _lease_key(lease: Lease) -> Key:
    return *_publication_key(lease.publication), number_key(lease.number)
