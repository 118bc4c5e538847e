"""Server reflection, as v1 and as v1alpha. Tools ask for v1 first; grpcio-reflection has v1alpha only.

The two differ in the name of the package alone, so one servicer serves both, and the descriptors of v1 are those of
v1alpha under the other name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format

# Imported for its descriptors: with them tools decode the details of errors.
from google.rpc import error_details_pb2  # noqa: F401
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as V1ALPHA
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

V1 = V1ALPHA.replace(".v1alpha.", ".v1.")

REFLECTIONS = (V1, V1ALPHA)


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Add both reflection services to a server. They list `services`, which are full names."""
    # grpc_reflection ships no types.
    make: Any = reflection_aio.ReflectionServicer
    handlers = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            make(services).ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    for service in REFLECTIONS:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _describe_v1() -> None:
    """Add the descriptors of v1 to protobuf's pool, unless other code of this process has added them."""
    pool: Any = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
        return
    except KeyError:
        pass
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    renamed = text_format.MessageToString(file).replace("v1alpha", "v1")
    pool.AddSerializedFile(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()).SerializeToString())


_describe_v1()
