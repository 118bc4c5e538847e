"""A node server as operators meet it: who may administer it, what a drain does to all of it, and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION

from kvferry._wire.channel import connect_async
from kvferry._wire.status import from_rpc_error
from kvferry.errors import InvalidField, NotAllowed
from kvferry.v1 import admin_pb2 as apb
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.admin_pb2_grpc import AdminStub
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from kvferry_server.node.loading import configure
from kvferry_server.node.server import OFFERED, NodeServer
from tests.support.certificates import Authority

TIMEOUT = 20


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[NodeServer]:
    server = NodeServer(configure(listen="127.0.0.1:0", unix=str(tmp_path / "node.sock"), drain=0))
    await server.start()
    yield server
    await server.stop(0)


async def problem(address: str, tls: Any = None) -> Exception:
    """What a Drain of another start ends with: whoever may administer is told that the epoch is wrong."""
    async with connect_async(address, tls) as channel:
        stub: Any = AdminStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Drain(apb.DrainRequest(home_epoch=bytes(16)), timeout=TIMEOUT)
    return from_rpc_error(caught.value, address)


async def test_operators_are_callers_on_the_unix_socket(server: NodeServer) -> None:
    over_unix, over_tcp = server.addresses
    assert isinstance(await problem(over_unix), InvalidField)
    # Every process of the host can connect to TCP.
    assert isinstance(await problem(over_tcp), NotAllowed)


async def test_certificate_alone_makes_no_operator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority.make(tmp_path, "ours")
    node, client = authority.issue("node"), authority.issue("somebody", "URI:spiffe://fleet/somebody")
    files = {"tls_cert": node.cert, "tls_key": node.key, "tls_ca": node.ca}
    server = NodeServer(configure(listen="127.0.0.1:0", unix=str(tmp_path / "node.sock"), drain=0, **files))
    await server.start()
    try:
        refused = await problem(server.addresses[1], client)
        assert isinstance(refused, NotAllowed)
        assert refused.values["method"] == "/kvferry.v1.Admin/Drain"
        assert isinstance(await problem(server.addresses[0]), InvalidField)
    finally:
        await server.stop(0)
    # The log has each refusal with the caller, and strangers cannot fill the log.
    (line,) = [record.getMessage() for record in caplog.records if "NOT_ALLOWED" in record.getMessage()]
    assert "method=Drain" in line
    assert "identity=spiffe://fleet/somebody" in line
    assert "peer=ipv4:127.0.0.1:" in line


async def test_drain_changes_health_and_leaves_the_server_up(server: NodeServer) -> None:
    async with connect_async(server.addresses[0]) as channel:
        info: Any = IntrospectionStub(channel)
        about = await info.GetServerInfo(ipb.GetServerInfoRequest(), timeout=TIMEOUT)
        assert not about.draining
        assert about.limits["max_calls"] == 1024
        admin: Any = AdminStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):
            answer = await admin.Drain(apb.DrainRequest(home_epoch=about.home_epoch), timeout=TIMEOUT)
            assert answer.leases == 0
        for service in ("", "kvferry.v1.KVTransfer", "kvferry.v1.Admin"):
            status = (await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT)).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await info.GetServerInfo(ipb.GetServerInfoRequest(), timeout=TIMEOUT)).draining


async def test_reflection_describes_all_services(server: NodeServer) -> None:
    asked = [reflection_pb2.ServerReflectionRequest(list_services="*")]
    # With these descriptors tools decode the details of errors.
    symbols = ["google.rpc.ErrorInfo", "google.rpc.RetryInfo", "kvferry.v1.Admin", REFLECTION]
    asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    asked += [reflection_pb2.ServerReflectionRequest(file_by_filename="google/rpc/error_details.proto")]
    async with connect_async(server.addresses[0]) as channel:
        untyped: Any = channel
        call = untyped.stream_stream(f"/{REFLECTION}/ServerReflectionInfo")(
            iter([r.SerializeToString() for r in asked])
        )
        answers = [reflection_pb2.ServerReflectionResponse.FromString(raw) async for raw in call]
    listed = [one.name for one in answers[0].list_services_response.service]
    assert sorted(listed) == sorted(OFFERED)
    for symbol, answer in zip([*symbols, "google.rpc.ErrorInfo"], answers[1:], strict=True):
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(raw)
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        declared = {f"{file.package}.{message.name}" for file in files for message in file.message_type}
        declared |= {f"{file.package}.{service.name}" for file in files for service in file.service}
        assert symbol in declared
