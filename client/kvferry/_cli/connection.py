"""Options, connection and paging of all commands that ask a node server."""

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

from kvferry._cli.render import print_json, safe
from kvferry.errors import EngineIncomplete, InvalidInput

# Nothing here imports gRPC or protobuf before a command runs: `kvferry --help` has to be quick.
if TYPE_CHECKING:
    import grpc

    from kvferry._directory.directory import Directory as _Directory
    from kvferry._wire.channel import TlsConfig
    from kvferry.geometry.model import EngineGeometry
    from kvferry.v1 import introspection_pb2

LOCAL = "unix:/run/kvferry/node.sock"  # The node server of this host
PAGE_SIZE = 1000

Response = TypeVar("Response")

Server = Annotated[
    str, typer.Option(envvar="KVFERRY_SERVER", metavar="ADDRESS", help="Node server to ask: unix:/path or host:port.")
]
Servers = Annotated[
    list[str],
    typer.Option(
        "--server",
        envvar="KVFERRY_SERVER",
        metavar="ADDRESS",
        help="Node server to ask: unix:/path or host:port. May be given several times.",
    ),
]
Directory = Annotated[
    str,
    typer.Option(
        envvar="KVFERRY_DIRECTORY", metavar="URL", help="Directory of the fleet: etcd://HOST:PORT or file:/PATH."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: the fields of the protos, complete and stable.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """The options by which a command reaches node servers; see `with_connection`."""

    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Longest wait for an answer.")] = 5.0
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="KVFERRY_TLS_CA", metavar="FILE", help="PEM file of the authority that signed the server."),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="KVFERRY_TLS_CERT", metavar="FILE", help="PEM file of a client certificate (mTLS)."),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(envvar="KVFERRY_TLS_KEY", metavar="FILE", help="PEM file of the certificate's key.")
    ] = None

    @contextmanager
    def node(self, server: Server = LOCAL, as_json: AsJson = False) -> Iterator[Node]:
        """Make a channel to a node server. Raises `typer.BadParameter` if an address or file cannot be used."""
        from kvferry._wire.channel import TlsConfig, connect

        files = self.tls_ca, self.tls_cert, self.tls_key
        try:
            tls = TlsConfig(*files) if any(files) else None
            channel = connect(server, tls)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from None
        with channel:
            yield Node(server, channel, tls, self.timeout, as_json)

    def look_up(self, url: str, ask: Callable[[_Directory], Response]) -> Response:
        """Ask a directory. Raises `typer.BadParameter` if its URL cannot be used, or `DirectoryUnavailable`."""
        from kvferry._directory.opening import open_directory

        try:
            directory = open_directory(url)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from None
        with directory:
            directory.wait(self.timeout)
            return ask(directory)


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's last parameter, ``connection`` or ``node``, by the fields of `Connection` as options; for
    ``node``, which is one node server, the parameters of `Connection.node` are options, too. typer itself makes no
    options of the fields of a dataclass."""
    *own, last = inspect.signature(command, eval_str=True).parameters.values()
    of_connection = list(inspect.signature(Connection, eval_str=True).parameters.values())
    _, *of_node = inspect.signature(Connection.node, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        connection = Connection(**{option.name: given.pop(option.name) for option in of_connection})
        if last.name == "connection":
            command(**given, connection=connection)
            return
        with connection.node(given.pop("server"), given.pop("as_json")) as node:
            command(**given, node=node)

    parameters = [*own, *(of_node if last.name == "node" else ()), *of_connection]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True, slots=True)
class Node:
    """Calls to one node server. All raise a `KvferryError` for an error answer, or if the server cannot be reached."""

    server: str
    channel: grpc.Channel
    tls: TlsConfig | None
    timeout: float
    as_json: bool

    def call(self, method: Callable[..., Response], request: object) -> Response:
        import grpc

        from kvferry._wire.status import from_rpc_error

        try:
            return method(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.server, self.tls) from None

    def show(self, answer: Any, text: str) -> None:
        if self.as_json:
            print_json(answer)
        else:
            print(safe(text))

    def act(self, method: str, **given: Any) -> Any:
        from kvferry.v1 import admin_pb2
        from kvferry.v1.admin_pb2_grpc import AdminStub

        request = getattr(admin_pb2, f"{method}Request")(**given)
        return self.call(getattr(AdminStub(self.channel), method), request)

    def info(self) -> introspection_pb2.GetServerInfoResponse:
        return self._asked("GetServerInfo")  # type: ignore[no-any-return]

    def summary(self, engine_id: str) -> introspection_pb2.EngineSummary:
        """Return an engine without its ranks."""
        return self._asked("GetEngine", engine_id=engine_id, page_size=1).summary  # type: ignore[no-any-return]

    def engine(self, engine_id: str) -> introspection_pb2.GetEngineResponse:
        """Return an engine with all its ranks."""
        return self._asked("GetEngine", lambda page: page.geometry.ranks, engine_id=engine_id)  # type: ignore[no-any-return]

    def geometry(self, engine_id: str) -> EngineGeometry:
        """Return the geometry of an engine. Raises `EngineIncomplete` if not all of its ranks have registered."""
        from kvferry._wire.geometry_codec import engine_from_proto

        answer = self.engine(engine_id)
        missing, count = list(answer.summary.missing_ranks), answer.summary.num_missing
        if count:
            more = f" and {count - len(missing)} more" if count > len(missing) else ""
            message = f"engine {engine_id!r}: ranks {missing}{more} have not registered"
            named = ",".join(map(str, missing))
            raise EngineIncomplete(message, engine_id=engine_id, missing_ranks=named, missing=count)
        return engine_from_proto(answer.geometry)

    def listing(self, kind: str, most: float = math.inf, rows: float = math.inf, **asked: str) -> Any:
        """Return at most `most` pages of a list as one response, and none after the first `rows` entries or somewhat
        more. The response has a `next_page_token` if there are more."""
        method, size = f"List{kind.title()}", int(min(rows, PAGE_SIZE))
        return self._asked(method, lambda page: getattr(page, kind), most, rows, page_size=size, **asked)

    def _asked(
        self,
        method: str,
        paged: Callable[[Any], Any] | None = None,
        most: float = math.inf,
        rows: float = math.inf,
        **asked: Any,
    ) -> Any:
        """Call a method of the service Introspection, page by page; `paged` returns the list of a page."""
        from kvferry.v1 import introspection_pb2
        from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

        call = getattr(IntrospectionStub(self.channel), method)
        request = getattr(introspection_pb2, f"{method}Request")(**asked)
        whole, taken = self.call(call, request), 1
        while paged is not None and whole.next_page_token and taken < most and len(paged(whole)) < rows:
            request.page_token = whole.next_page_token
            page = self.call(call, request)
            paged(whole).extend(paged(page))
            whole.next_page_token, taken = page.next_page_token, taken + 1
            if getattr(page, "recovering", False):
                # The home was restarted meanwhile.
                whole.recovering = True
        return whole
