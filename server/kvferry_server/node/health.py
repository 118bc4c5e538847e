"""gRPC's health service."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvferry_server.home.home import Wakeups
from kvferry_server.servicers.callers import Context


class Health(aio.HealthServicer):
    """grpcio's health service, without the lock that it keeps while a Watch writes: one client that takes nothing would
    keep other Watches, and a drain, waiting for ever. Belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._wakeups = Wakeups()  # Topics: names of services

    async def Watch(  # type: ignore[override]  # grpcio's writes the messages itself.
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        statuses: dict[str, Any] = self._server_status  # type: ignore[attr-defined]  # The stubs leave it out.
        sent = None
        with self._wakeups.watching(request.service) as waker:
            while True:
                waker.clear()
                status = statuses.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    yield HealthCheckResponse(status=status)
                    sent = status
                await waker.wait()

    async def _set(self, service: str, status: Any) -> None:
        await super()._set(service, status)  # type: ignore[misc]
        self._wakeups.wake(service)
