"""References as routers make them, for the tests of homes: readers that wait with them, sources that publish under
them, and declines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvferry._wire.reference import router_reference
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.values import EngineRef
from tests.support.node_in_process import ADVERTISE, TIMEOUT, Node, running
from tests.support.parties import SECRETS, P

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
Reading = asyncio.Task[pb.ReadBlocksResponse]


def made(name: str = "room-7", key: bytes = KEY, engine_id: str = P.engine_id, rank: int = 0) -> str:
    """A reference as a router makes it."""
    return router_reference(ADVERTISE, engine_id, router_key=name, key=key, data_parallel_rank=rank)


async def waiting_at(node: Node, count: int) -> None:
    """Wait until `count` reads wait under keys of routers."""
    for _ in range(int(TIMEOUT / 0.001)):
        listed = await node.introspection.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT)
        if sum(transfer.HasField("waited") for transfer in listed.transfers) == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{count} reads do not wait")


async def begin(node: Node, given: str, before: int = 0, **changes: Any) -> Reading:
    """Begin a read; return once it waits at the home, beside earlier reads."""
    read = asyncio.create_task(node.read(reference=given, **changes))
    await waiting_at(node, before + 1)
    return read


async def publish(node: Node, number: int = 1, name: str = "room-7", key: bytes = KEY, **changes: Any) -> Any:
    return await node.publish(number, router_key=name, key=key, **changes)


async def decline(node: Node, *references: str) -> list[pb.NotificationResult]:
    """Decline as a router does, without a sender."""
    declines = [pb.Notification(decline=pb.Decline(reference=given)) for given in references]
    return list((await node.kv.Notify(pb.NotifyRequest(notifications=declines), timeout=TIMEOUT)).results)


async def released(watch: Any) -> tuple[int, int]:
    """Return the next release event at the source, and its outcome."""
    told = (await watch.next()).released
    return told.publication, told.outcome


@asynccontextmanager
async def small(tmp_path: Path, **limits: int) -> AsyncIterator[Node]:
    async with running(tmp_path, Limits(**limits)) as node:
        await node.open_engine()
        await node.register()
        yield node


def engine(engine_id: str) -> EngineRef:
    """Another engine with the session secret of P."""
    ref = EngineRef(engine_id, P.incarnation)
    SECRETS.setdefault(ref, SECRETS[P])
    return ref
