"""What all commands that ask a node server share: the options, the connection and paging."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvferry.errors import InvalidInput

# Nothing here imports gRPC or protobuf before a command runs: `kvferry --help` has to be quick.
if TYPE_CHECKING:
    import grpc

    from kvferry._directory.directory import Directory as _Directory
    from kvferry._wire.channel import TlsConfig
    from kvferry.v1 import introspection_pb2
    from kvferry.v1.admin_pb2_grpc import AdminStub
    from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

DEFAULT_SERVER = "unix:/run/kvferry/node.sock"
PAGE_SIZE = 1000

Response = TypeVar("Response")

Server = Annotated[
    str,
    typer.Option(
        "--server", envvar="KVFERRY_SERVER", metavar="ADDRESS", help="Node server to ask: unix:/path or host:port."
    ),
]
Directory = Annotated[
    str,
    typer.Option(
        "--directory",
        envvar="KVFERRY_DIRECTORY",
        metavar="URL",
        help="Directory of the fleet: etcd://HOST:PORT, dns:///NAME or file:/PATH.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: the fields of the protos, complete and stable.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """The options by which a command reaches node servers. `with_connection` makes an option of each field."""

    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait for an answer.")
    ] = 5.0
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            envvar="KVFERRY_TLS_CA",
            metavar="FILE",
            help="PEM file of the authority that signed the server.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", envvar="KVFERRY_TLS_CERT", metavar="FILE", help="PEM file of a client certificate (mTLS)."
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", envvar="KVFERRY_TLS_KEY", metavar="FILE", help="PEM file of the certificate's key."),
    ] = None

    @contextmanager
    def node(self, server: str) -> Iterator[Node]:
        """Make a channel to a node server, which connects with its first call.

        Raises:
            typer.BadParameter: an address or file that cannot be used.
        """
        from kvferry._wire.channel import TlsConfig, connect

        files = self.tls_ca, self.tls_cert, self.tls_key
        try:
            tls = TlsConfig(*files) if any(files) else None
            channel = connect(server, tls)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from None
        with channel:
            yield Node(server, channel, tls, self.timeout)


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of `Connection` as options in place of its parameter ``connection``.

    typer makes options of the parameters of a function, and does not look into dataclasses.
    """
    own = inspect.signature(command, eval_str=True).parameters
    options = inspect.signature(Connection, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: object) -> None:
        made: Callable[..., Connection] = Connection
        connection = made(**{name: given.pop(name) for name in options})
        command(**given, connection=connection)

    parameters = [*(own[name] for name in own if name != "connection"), *options.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def look_up(url: str, timeout: float, ask: Callable[[_Directory], Response]) -> Response:
    """Ask a directory, once it has answered.

    Raises:
        typer.BadParameter: the URL cannot be used.
        DirectoryUnavailable: the directory does not answer within `timeout` seconds.
    """
    from kvferry._directory.opening import open_directory

    try:
        directory = open_directory(url)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None
    try:
        directory.wait(timeout)
        return ask(directory)
    finally:
        directory.close()


@dataclass(frozen=True, slots=True)
class Node:
    """Calls to one node server. All raise a `KvferryError` for what it answers, or if it cannot be reached."""

    server: str
    channel: grpc.Channel
    tls: TlsConfig | None
    timeout: float

    def call(self, method: Callable[..., Response], request: object) -> Response:
        """Call a method of a stub."""
        import grpc

        from kvferry._wire.status import from_rpc_error

        try:
            return method(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.server, self.tls) from None

    @property
    def introspection(self) -> IntrospectionStub:
        """Its service Introspection."""
        from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

        return IntrospectionStub(self.channel)

    @property
    def admin(self) -> AdminStub:
        """Its service Admin."""
        from kvferry.v1.admin_pb2_grpc import AdminStub

        return AdminStub(self.channel)

    def info(self) -> introspection_pb2.GetServerInfoResponse:
        """Ask for what it says of itself."""
        from kvferry.v1 import introspection_pb2

        return self.call(self.introspection.GetServerInfo, introspection_pb2.GetServerInfoRequest())

    def engine(self, engine_id: str) -> introspection_pb2.GetEngineResponse:
        """Ask for an engine with all its ranks, page by page."""
        from kvferry.v1 import introspection_pb2

        request = introspection_pb2.GetEngineRequest(engine_id=engine_id)
        whole = self.call(self.introspection.GetEngine, request)
        while whole.next_page_token:
            request.page_token = whole.next_page_token
            page = self.call(self.introspection.GetEngine, request)
            whole.geometry.ranks.extend(page.geometry.ranks)
            whole.next_page_token = page.next_page_token
        return whole

    def summary(self, engine_id: str) -> introspection_pb2.EngineSummary:
        """Ask for an engine without its ranks."""
        from kvferry.v1 import introspection_pb2

        request = introspection_pb2.GetEngineRequest(engine_id=engine_id, page_size=1)
        return self.call(self.introspection.GetEngine, request).summary

    def listing(self, kind: str, most: float = math.inf, **asked: str) -> tuple[Any, bool]:
        """Ask for at most so many pages of a list: of engines, requests or transfers. Returns them as one response, and
        whether they were all."""
        from kvferry.v1 import introspection_pb2

        method = getattr(self.introspection, f"List{kind.title()}")
        request = getattr(introspection_pb2, f"List{kind.title()}Request")(page_size=PAGE_SIZE, **asked)
        whole = self.call(method, request)
        taken, following = 1, whole.next_page_token
        while following and taken < most:
            request.page_token = following
            page = self.call(method, request)
            getattr(whole, kind).extend(getattr(page, kind))
            taken, following = taken + 1, page.next_page_token
        whole.next_page_token = ""
        return whole, not following
