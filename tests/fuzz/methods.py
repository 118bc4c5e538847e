"""Every method that a node server offers, from the descriptors: a new method is fuzzed without being named here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvferry_server.node.server import OFFERED


@dataclass(frozen=True, slots=True)
class Method:
    """A method; `path` is what goes into ``:path``."""

    path: str
    request: Descriptor
    client_streams: bool
    server_streams: bool

    def __str__(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def request_class(self) -> type[Message]:
        return message_factory.GetMessageClass(self.request)


def _methods(service: str) -> list[Method]:
    found: Any = descriptor_pool.Default().FindServiceByName(service)
    return [
        Method(f"/{service}/{method.name}", method.input_type, method.client_streaming, method.server_streaming)
        for method in found.methods
    ]


METHODS = tuple(method for service in OFFERED for method in _methods(service))
