"""`kvferry.v1.Introspection`: what operators and tools ask. Reads the home; changes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from kvferry._wire.geometry_codec import engine_from_proto
from kvferry._wire.plan_codec import plan_to_proto
from kvferry.errors import InvalidField, LimitReached
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.plan import plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionServicer
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.registry import Engine
from kvferry_server.domain.sources import MAX_RANK_BYTES, engine_header
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, encode
from kvferry_server.servicers.callers import peer_of
from kvferry_server.servicers.paging import MAX_SIZE, check_size, make_token, number_key, page, parse_token
from kvferry_server.servicers.worker import Worker

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Shelf = TypeVar("Shelf")

PLAN_SECONDS = 5
"""For the ranks of one PlanRead together: a tool may ask for engines that take minutes."""

PLAN_BYTES = 3 << 20
"""Bytes of the plans of one PlanRead together."""

RANKS_BYTES = MAX_RANK_BYTES
"""Bytes of the ranks of one GetEngine."""


class Introspection(IntrospectionServicer):
    """The service over one home, on the home's event loop."""

    def __init__(self, home: Home, worker: Worker) -> None:
        self._home = home
        self._worker = worker
        # A thread of its own: a tool's big questions must not take those of handshakes.
        self._planner = ThreadPoolExecutor(1, "kvferry-plan")

    async def ListEngines(self, request: ipb.ListEnginesRequest, context: Context) -> ipb.ListEnginesResponse:
        """See the contract."""
        home = self._home
        with home.turn():
            shelves = {engine.ref: [((), engine)] for engine in home.engines.engines()}
            summaries, token = page(shelves, self._summary, request.page_size, request.page_token)
        return ipb.ListEnginesResponse(home_epoch=home.epoch, engines=summaries, next_page_token=token)

    async def GetEngine(self, request: ipb.GetEngineRequest, context: Context) -> ipb.GetEngineResponse:
        """See the contract."""
        home = self._home
        engine_id = checks.text("engine_id", request.engine_id)
        incarnation, after = _rank_after(request.page_token)
        most = check_size(request.page_size) or MAX_SIZE
        with home.turn():
            engine = home.engines.find_live(engine_id, incarnation)
            summary, source, first = self._summary(engine), engine.source, engine.first
        if source is None or first is None:
            geometry = geometry_pb2.EngineGeometry(engine_id=engine_id, incarnation=engine.ref.incarnation)
            return ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary, geometry=geometry)

        def answer() -> ipb.GetEngineResponse:
            found = engine_header(engine.ref, first)
            response = ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary)
            size, last = 0, after
            for rank, encoded in source.ranks():
                if rank <= after:
                    continue
                if found.ranks and (size + len(encoded) > RANKS_BYTES or len(found.ranks) == most):
                    response.next_page_token = make_token((engine.ref.incarnation, number_key(last)))
                    break
                found.ranks.add().MergeFromString(encoded)
                size, last = size + len(encoded), rank
            response.geometry.CopyFrom(found)
            return response

        return await self._worker.run(peer_of(context), 0, answer)

    async def ListRequests(self, request: ipb.ListRequestsRequest, context: Context) -> ipb.ListRequestsResponse:
        """See the contract."""
        home = self._home
        wanted = checks.text("engine_id", request.engine_id, least=0)
        with home.turn() as now:
            shelves = _of_engine(wanted, home.lessor.shelves_of_publications())
            encoded = partial(encode.request_summary, now=now)
            summaries, token = page(shelves, encoded, request.page_size, request.page_token)
        return ipb.ListRequestsResponse(home_epoch=home.epoch, requests=summaries, next_page_token=token)

    async def ListTransfers(self, request: ipb.ListTransfersRequest, context: Context) -> ipb.ListTransfersResponse:
        """See the contract."""
        home = self._home
        wanted = checks.text("engine_id", request.engine_id, least=0)
        with home.turn() as now:
            shelves = _of_engine(wanted, home.lessor.shelves_of_leases())
            encoded = partial(encode.transfer_summary, now=now)
            summaries, token = page(shelves, encoded, request.page_size, request.page_token)
        return ipb.ListTransfersResponse(home_epoch=home.epoch, transfers=summaries, next_page_token=token)

    async def PlanRead(self, request: ipb.PlanReadRequest, context: Context) -> ipb.PlanReadResponse:
        """See the contract."""
        source = await self._geometry("source", request.source_engine_id, request, peer_of(context))
        destination = await self._geometry("destination", request.destination_engine_id, request, peer_of(context))

        left = threading.Event()

        def answer() -> ipb.PlanReadResponse:
            until = time.monotonic() + PLAN_SECONDS
            read_from = source or engine_from_proto(request.source_geometry)
            read_into = destination or engine_from_proto(request.destination_geometry)
            ranks = sorted(set(request.ranks)) or [rank.rank for rank in read_into.ranks]
            if len(ranks) > self._home.limits.ranks:
                raise InvalidField("ranks", f"{len(ranks)} ranks", f"at most {self._home.limits.ranks}")
            response = ipb.PlanReadResponse(home_epoch=self._home.epoch)
            size = 0
            for index, rank in enumerate(ranks):
                if left.is_set() or (response.ranks and time.monotonic() > until):
                    response.left_ranks.extend(ranks[index:])
                    break
                plan = plan_to_proto(plan_read(read_from, read_into, rank))
                size += plan.ByteSize()
                if size > PLAN_BYTES and not response.ranks:
                    message = f"the plan of rank {rank} takes {size} bytes, more than {PLAN_BYTES}"
                    raise LimitReached(message, limit="plan_bytes", value=PLAN_BYTES)
                if size > PLAN_BYTES:
                    response.left_ranks.extend(ranks[index:])
                    break
                response.ranks.append(plan)
            return response

        try:
            return await asyncio.get_running_loop().run_in_executor(self._planner, answer)
        finally:
            # A thread cannot be cancelled; it looks whether somebody still waits for it.
            left.set()

    async def _geometry(
        self, side: str, engine_id: str, request: ipb.PlanReadRequest, host: str
    ) -> EngineGeometry | None:
        """Geometry of an engine here; None if the request brings one."""
        given = request.WhichOneof("source" if side == "source" else "destination")
        if given is None:
            raise InvalidField(side, None, "an engine_id or a geometry")
        if given == f"{side}_geometry":
            return None
        checks.text(f"{side}_engine_id", engine_id)
        with self._home.turn():
            engine = self._home.engines.find_live(engine_id)
            source = self._home.engines.check_readable(engine)
        return await self._worker.run(host, 0, lambda: source.geometry)

    def _summary(self, engine: Engine) -> ipb.EngineSummary:
        return encode.engine_summary(engine, *self._home.lessor.counts(engine.ref))


def _rank_after(page_token: str) -> tuple[bytes, int]:
    """The incarnation whose ranks are paged, and the last rank of the page before; none, and -1, for the first."""
    key = parse_token(page_token)
    if not key:
        return b"", -1
    if [len(part) for part in key] != [16, 8]:
        raise InvalidField("page_token", page_token[:64], "a token from a page before")
    return key[0], int.from_bytes(key[1], "big")


def _of_engine(engine_id: str, shelves: Mapping[EngineRef, Shelf]) -> Mapping[EngineRef, Shelf]:
    """The shelves of one engine; of all without a name."""
    return {ref: shelf for ref, shelf in shelves.items() if engine_id in ("", ref.engine_id)}
