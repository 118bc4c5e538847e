"""Stubs of gRPC for tests that speak with messages of their own, as a program in another language does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry._wire.version import OURS_AS_RELAY, OURS_ENCODED
from kvferry.v1 import kv_transfer_pb2_grpc
from kvferry.v1.kv_transfer_pb2 import DESCRIPTOR


class KVTransferStub(kv_transfer_pb2_grpc.KVTransferStub):
    """The generated stub, whose requests say this release's version where they say none.

    Args:
        channel: of either kind, synchronous or not.
    """

    def __init__(self, channel: Any) -> None:
        super().__init__(_Introducing(channel))  # type: ignore[arg-type]


class _Introducing:
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def unary_unary(self, path: str, request_serializer: Callable[[Any], bytes], **more: Any) -> Any:
        return self._channel.unary_unary(path, _introducing(path, request_serializer), **more)

    def unary_stream(self, path: str, request_serializer: Callable[[Any], bytes], **more: Any) -> Any:
        return self._channel.unary_stream(path, _introducing(path, request_serializer), **more)


def _introducing(path: str, serializer: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    method = DESCRIPTOR.services_by_name["KVTransfer"].methods_by_name[path.rpartition("/")[2]]
    if "version" not in method.input_type.fields_by_name:
        return serializer

    def serialized(request: Any) -> bytes:
        if request.HasField("version"):
            return serializer(request)
        made = type(request)()
        made.CopyFrom(request)
        made.version.CopyFrom(OURS_ENCODED)
        if getattr(made, "relayed_by", ""):
            made.version.relay.CopyFrom(OURS_AS_RELAY)
        return serializer(made)

    return serialized
