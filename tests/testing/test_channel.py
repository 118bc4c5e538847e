"""Calls within the process end as those over gRPC do: the same code runs on both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import kvferry
from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.channel import MAX_MESSAGE_BYTES, connect
from kvferry._wire.status import from_rpc_error
from kvferry._wire.version import introduce
from kvferry.testing import Fabric
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.stubs import KVTransferStub

SOON = 20.0


@pytest.fixture(params=["grpc", "in-process"])
def channel(request: pytest.FixtureRequest) -> Iterator[grpc.Channel]:
    if request.param == "grpc":
        with kvferry.serve() as server, connect(server.address) as made:
            yield made
    else:
        with Fabric() as fabric:
            yield fabric.client()._network.dial(fabric.address, None)


def open_watch(channel: grpc.Channel, timeout: float | None = None) -> Any:
    """A Watch whose state was told: from now on it waits."""
    secret = new_session_secret()
    engine = pb.EngineRef(engine_id="e", incarnation=incarnation_of(secret))
    request = pb.WatchRequest(engine=engine, session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER)
    stream = KVTransferStub(channel).Watch(request, timeout=timeout)
    assert [next(stream).WhichOneof("event") for _ in range(2)] == ["opened", "synced"]
    return stream


@pytest.fixture
def watch(channel: grpc.Channel) -> Any:
    return open_watch(channel)


def raised(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_an_answer_arrives(channel: grpc.Channel) -> None:
    stub = IntrospectionStub(channel)
    assert stub.ListEngines(ipb.ListEnginesRequest(), timeout=SOON).home_epoch
    call = stub.ListEngines.future(ipb.ListEnginesRequest(), timeout=SOON)
    assert (len(call.result().home_epoch), call.code()) == (16, grpc.StatusCode.OK)


def test_an_answer_arrives_without_a_waiting_caller(channel: grpc.Channel) -> None:
    done, seen = threading.Event(), []

    def take(future: Any) -> None:
        seen.append((future.exception(), len(future.result().home_epoch)))
        done.set()

    future = IntrospectionStub(channel).ListEngines.future(ipb.ListEnginesRequest(), timeout=SOON)
    future.add_done_callback(take)
    assert done.wait(SOON)
    assert (seen, future.done(), future.cancelled()) == ([(None, 16)], True, False)


def test_an_error_arrives_with_its_values(channel: grpc.Channel) -> None:
    request = ipb.GetEngineRequest(engine_id="nobody")
    error = raised(lambda: IntrospectionStub(channel).GetEngine(request, timeout=SOON))
    typed = from_rpc_error(error, "address")
    assert (type(typed).__name__, typed.retryable) == ("HomeRecovering", True)
    assert (typed.values["engine_id"], typed.retry_after is not None) == ("nobody", True)
    future = IntrospectionStub(channel).GetEngine.future(request, timeout=SOON)
    assert isinstance(future.exception(SOON), grpc.RpcError)


def test_a_call_without_a_deadline_is_refused(channel: grpc.Channel) -> None:
    error = raised(lambda: KVTransferStub(channel).Notify(pb.NotifyRequest()))
    assert type(from_rpc_error(error, "address")).__name__ == "DeadlineRequired"


@pytest.mark.parametrize("path", ["/kvferry.v1.KVTransfer/Notify", "/kvferry.v1.KVTransfer/Watch"])
def test_an_object_that_is_no_message_is_refused(channel: grpc.Channel, path: str) -> None:
    call = channel.unary_unary(path, bytes, bytes)
    error = raised(lambda: call(b"\xff\xff", timeout=SOON))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_method_that_is_not_offered_is_refused(channel: grpc.Channel) -> None:
    error = raised(lambda: channel.unary_unary("/kvferry.v1.KVTransfer/Nothing", bytes, bytes)(b"", timeout=SOON))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_ends_a_stream(channel: grpc.Channel) -> None:
    stream = open_watch(channel, timeout=1.0)
    assert stream.is_active()
    assert raised(lambda: next(stream)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stream_is_cancelled_by_another_thread(watch: Any) -> None:
    codes = []
    waiting = threading.Thread(target=lambda: codes.append(raised(lambda: next(watch)).code()))
    waiting.start()
    watch.cancel()
    waiting.join(SOON)
    assert (codes, watch.code(), watch.cancelled()) == ([grpc.StatusCode.CANCELLED], grpc.StatusCode.CANCELLED, True)


def test_a_call_that_was_cancelled_has_neither_result_nor_exception(channel: grpc.Channel) -> None:
    secret = new_session_secret()
    # A Watch does not end by itself.
    request = pb.WatchRequest(
        engine=pb.EngineRef(engine_id="e", incarnation=incarnation_of(secret)),
        session_secret=secret,
        role=pb.WATCH_ROLE_SCHEDULER,
    )
    introduce(request)
    serialize, deserialize = pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString
    call = channel.unary_unary("/kvferry.v1.KVTransfer/Watch", serialize, deserialize).future(request, timeout=SOON)
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    assert call.cancel()
    assert ended.wait(SOON)
    with pytest.raises(grpc.FutureCancelledError):
        call.exception(SOON)
    with pytest.raises(grpc.FutureCancelledError):
        call.result(SOON)
    assert call.cancelled()


@pytest.mark.parametrize("method", ["ListEngines", "Nothing"])
def test_a_message_that_is_too_large_is_refused(channel: grpc.Channel, method: str) -> None:
    call = channel.unary_unary(f"/kvferry.v1.Introspection/{method}", bytes, bytes)
    error = raised(lambda: call(bytes(MAX_MESSAGE_BYTES + 1), timeout=SOON))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(from_rpc_error(error, "address")).__name__ == "MessageTooLarge"


def test_the_end_of_a_channel_ends_its_streams(channel: grpc.Channel, watch: Any) -> None:
    channel.close()
    assert raised(lambda: next(watch)).code() is grpc.StatusCode.CANCELLED
    with pytest.raises(ValueError, match="closed channel"):
        IntrospectionStub(channel).ListEngines(ipb.ListEnginesRequest(), timeout=SOON)


def test_a_client_that_leaves_is_noticed_by_the_home(channel: grpc.Channel, watch: Any) -> None:
    stub = IntrospectionStub(channel)

    def live() -> bool:
        (engine,) = stub.ListEngines(ipb.ListEnginesRequest(), timeout=SOON).engines
        return bool(engine.state != ipb.ENGINE_STATE_LOST)

    assert live()
    watch.cancel()
    while live():
        pass
