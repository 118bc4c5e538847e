"""The service `kvferry.v1.Introspection`, for operators and tools. It reads the home and changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict

from kvferry._clock import to_duration
from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry._wire.geometry_codec import engine_from_proto
from kvferry._wire.plan_codec import plan_to_proto
from kvferry._wire.reference import MAX_LENGTH
from kvferry._wire.version import OURS
from kvferry.errors import InvalidField, LimitReached
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.plan import plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionServicer
from kvferry_server.domain.engine_description import engine_header
from kvferry_server.domain.limits import MAX_HEADER_BYTES, MAX_PAYLOAD, MAX_RANK_BYTES
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, encode, limits, lists
from kvferry_server.servicers.callers import Context, remote_host
from kvferry_server.servicers.limits import ENGINE_PAGE_BYTES, MAX_PAGE_SIZE, MAX_PLAN_BYTES
from kvferry_server.servicers.lists import make_token, parse_token
from kvferry_server.servicers.worker import Worker

PLAN_SECONDS = 5  # Longest planning of one PlanRead. Some engines take minutes; ranks that are left out are named.

CAPABILITIES = (
    "admin",
    "checksums",
    "decline_forwarding",
    "list_filters",
    "prompt_marks",
    "router_references",
    "unfinished_blocks",
)
"""Optional features, for callers to check: servers in other languages may lack them."""

OF_FIELDS = {
    "message_bytes": MAX_MESSAGE_BYTES,
    "notify_bytes": MAX_NOTIFY_BYTES,
    "engine_id": limits.MAX_TEXT,
    "request_id": limits.MAX_TEXT,
    "reference": MAX_LENGTH,
    "payload": MAX_PAYLOAD,
    "notifications": limits.MAX_NOTIFICATIONS,
    "identity": limits.MAX_IDENTITY,
    "groups": limits.MAX_GROUPS,
    "runs": limits.MAX_RUNS,
    "layers": limits.MAX_LAYERS,
    "unfinished": limits.MAX_UNFINISHED,
    "marks": limits.MAX_MARKS,
    "header_bytes": MAX_HEADER_BYTES,
    "rank_bytes": MAX_RANK_BYTES,
    "metadata": limits.MAX_METADATA,
    "page_size": limits.MAX_PAGE_SIZE,
}
"""Limits on fields of requests, the same for every node server of this version."""


class Introspection(IntrospectionServicer):
    """The service of one home. Runs on the home's event loop; plans are made in a thread of their own. `call_limits`,
    by name, are the node server's own limits for GetServerInfo."""

    def __init__(self, home: Home, worker: Worker, call_limits: Mapping[str, int]) -> None:
        self._home = home
        self._call_limits = call_limits
        self._worker = worker
        # Not the worker of geometries: a tool's large plans must not delay handshakes.
        self._planner = Worker()

    async def GetServerInfo(self, request: ipb.GetServerInfoRequest, context: Context) -> ipb.GetServerInfoResponse:
        home = self._home
        with home.turn() as now:
            return ipb.GetServerInfoResponse(
                home_epoch=home.epoch,
                version=OURS.release,
                contract_revision=OURS.revision,
                oldest_revision=OURS.oldest,
                advertise=home.advertise,
                uptime=to_duration(now - home.records.started),
                draining=home.draining,
                times=encode.times(home.times),
                limits={**OF_FIELDS, **asdict(home.limits), **self._call_limits},
                capabilities=CAPABILITIES,
            )

    async def ListEngines(self, request: ipb.ListEnginesRequest, context: Context) -> ipb.ListEnginesResponse:
        return lists.engines(self._home, request)

    async def GetEngine(self, request: ipb.GetEngineRequest, context: Context) -> ipb.GetEngineResponse:
        home = self._home
        engine_id = checks.text("engine_id", request.engine_id)
        before = parse_token(request.page_token)
        incarnation, after = (b"", -1) if before is None else (before[0].incarnation, before[1])
        most = checks.within("page_size", request.page_size, MAX_PAGE_SIZE) or MAX_PAGE_SIZE
        with home.turn():
            engine = home.engines.find_live(engine_id, incarnation)
            summary, description, first = encode.engine_summary(engine), engine.description, engine.first
        if description is None or first is None:
            geometry = geometry_pb2.EngineGeometry(engine_id=engine_id, incarnation=engine.ref.incarnation)
            return ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary, geometry=geometry)

        def answer() -> ipb.GetEngineResponse:
            found = engine_header(engine.ref, first)
            response = ipb.GetEngineResponse(home_epoch=home.epoch, summary=summary)
            size, last = 0, after
            for rank, encoded in description.ranks():
                if rank <= after:
                    continue
                if found.ranks and (size + len(encoded) > ENGINE_PAGE_BYTES or len(found.ranks) == most):
                    response.next_page_token = make_token((engine.ref, last))
                    break
                found.ranks.add().MergeFromString(encoded)
                size, last = size + len(encoded), rank
            response.geometry.CopyFrom(found)
            return response

        return await self._worker.run(remote_host(context), 0, answer)

    async def ListRequests(self, request: ipb.ListRequestsRequest, context: Context) -> ipb.ListRequestsResponse:
        return lists.requests(self._home, request)

    async def ListTransfers(self, request: ipb.ListTransfersRequest, context: Context) -> ipb.ListTransfersResponse:
        return lists.transfers(self._home, request)

    async def PlanRead(self, request: ipb.PlanReadRequest, context: Context) -> ipb.PlanReadResponse:
        """Plan a read without making it, for the ranks in the request; ranks that do not fit the answer are named."""
        host = remote_host(context)
        source = await self._geometry("source", request.source_engine_id, request, host)
        destination = await self._geometry("destination", request.destination_engine_id, request, host)

        caller_left = threading.Event()

        def answer() -> ipb.PlanReadResponse:
            until = time.monotonic() + PLAN_SECONDS
            read_from = source or engine_from_proto(request.source_geometry)
            read_into = destination or engine_from_proto(request.destination_geometry)
            ranks = sorted(set(request.ranks)) or [rank.rank for rank in read_into.ranks]
            checks.within("ranks", len(ranks), self._home.limits.ranks, unit="ranks")
            response = ipb.PlanReadResponse(home_epoch=self._home.epoch)
            size = 0
            for index, rank in enumerate(ranks):
                if caller_left.is_set() or (response.ranks and time.monotonic() > until):
                    response.left_ranks.extend(ranks[index:])
                    break
                plan = plan_to_proto(plan_read(read_from, read_into, rank))
                size += plan.ByteSize()
                if size > MAX_PLAN_BYTES and not response.ranks:
                    message = f"the plan of rank {rank} takes {size} bytes, more than an answer's {MAX_PLAN_BYTES}"
                    raise LimitReached(message, limit="plan_bytes", value=MAX_PLAN_BYTES)
                if size > MAX_PLAN_BYTES:
                    response.left_ranks.extend(ranks[index:])
                    break
                response.ranks.append(plan)
            return response

        try:
            return await self._planner.run(host, request.ByteSize(), answer)
        finally:
            # A thread cannot be cancelled, so it checks between ranks whether the call still waits.
            caller_left.set()

    async def _geometry(
        self, side: str, engine_id: str, request: ipb.PlanReadRequest, host: str
    ) -> EngineGeometry | None:
        """Return the geometry of an engine at this home; None if the request has a geometry."""
        given = request.WhichOneof("source" if side == "source" else "destination")
        if given is None:
            raise InvalidField(side, None, "an engine_id or a geometry")
        if given == f"{side}_geometry":
            return None
        checks.text(f"{side}_engine_id", engine_id)
        with self._home.turn():
            engine = self._home.engines.find_live(engine_id)
            description = engine.check_readable()
        return await self._worker.run(host, 0, lambda: description.geometry)
