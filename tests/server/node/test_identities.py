"""Under mutual TLS a lease belongs to the certificate that acquired it: real certificates, a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from kvferry._wire.channel import connect
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry.errors import KvferryError, WrongIdentity
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.certificates import Authority, tls_flags
from tests.support.node_in_process import (
    TIMEOUT,
    proto,
    publish_notification,
    read_done,
    read_request,
    register_request,
    snapshot,
)
from tests.support.node_servers import Kvferryd
from tests.support.parties import SECRETS, D, P, read_id
from tests.support.stubs import KVTransferStub

Stubs = dict[str, Any]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stubs]:
    """Stubs of callers with certificates of one authority, and of a caller on the UNIX socket."""
    folder = tmp_path_factory.mktemp("identities")
    authority, socket = Authority.make(folder, "fleet"), folder / "node.sock"
    certificates = {
        "reader": authority.issue("reader", "DNS:node-1,URI:spiffe://fleet/decode"),
        "its other node": authority.issue("reader-2", "DNS:node-2,URI:spiffe://fleet/decode"),
        "stranger": authority.issue("stranger", "DNS:node-3,URI:spiffe://fleet/prefill"),
        "named": authority.issue("named", ""),
        "nameless": authority.issue("nameless", "", "/O=fleet"),
        "nameless, too": authority.issue("nameless-too", "", "/O=fleet"),
    }
    with ExitStack() as stack:
        flags = ["--listen", "127.0.0.1:0", "--unix", str(socket), *tls_flags(authority.issue("node"))]
        server = stack.enter_context(Kvferryd(*flags, "--drain", "0"))
        channels = {name: connect(server.advertise, tls) for name, tls in certificates.items()}
        channels["local"] = connect(f"unix:{socket}", None)
        stubs = {name: KVTransferStub(stack.enter_context(channel)) for name, channel in channels.items()}
        local = stubs["local"]
        # Kept, because an unreferenced stream is cancelled.
        watch = local.Watch(pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER))
        while next(watch).WhichOneof("event") != "synced":
            pass
        local.RegisterCache(register_request(), timeout=TIMEOUT)
        source = pb.NotifyRequest(sender=proto(P), session_secret=SECRETS[P], notifications=snapshot())
        source.notifications.append(publish_notification(1, expected_reads=9))
        local.Notify(source, timeout=TIMEOUT)
        yield stubs
        watch.cancel()


def acquired(stub: Any, name: str) -> pb.Accepted:
    answer: pb.ReadBlocksResponse = stub.ReadBlocks(read_request(read_id=read_id(name)), timeout=TIMEOUT)
    return answer.accepted


def notified(stub: Any, notification: pb.Notification) -> pb.NotificationResult:
    """Return the result, or raise its error."""
    request = pb.NotifyRequest(sender=proto(D), notifications=[notification])
    results: list[pb.NotificationResult] = stub.Notify(request, timeout=TIMEOUT).results
    (result,) = results
    if result.WhichOneof("kind") == "error":
        raise from_notification_error(result.error)
    return result


def calls(stub: Any, name: str, lease_id: bytes) -> dict[str, Callable[[], object]]:
    """All calls that a lease_id and a read_id allow."""
    checksums = pb.ReadChecksumsRequest(reader=proto(D), lease_id=lease_id)
    again = read_request(read_id=read_id(name), lease_id=lease_id)
    return {
        "replay": lambda: acquired(stub, name),
        "ask again": lambda: stub.ReadBlocks(again, timeout=TIMEOUT),
        "renew": lambda: notified(stub, pb.Notification(renew=pb.Renew(lease_id=lease_id))),
        "checksums": lambda: stub.ReadChecksums(checksums, timeout=TIMEOUT),
        "report": lambda: notified(stub, read_done(lease_id, 0)),
        "cancel": lambda: notified(stub, pb.Notification(cancel=pb.CancelRead(lease_id=lease_id))),
    }


def outcome(call: Callable[[], object]) -> KvferryError | None:
    try:
        call()
    except grpc.RpcError as error:
        return from_rpc_error(error, "test")
    except KvferryError as error:
        return error
    return None


def test_stolen_lease_id_is_useless_under_another_certificate(stubs: Stubs) -> None:
    lease = acquired(stubs["reader"], "stolen")
    for name, call in calls(stubs["stranger"], "stolen", lease.lease_id).items():
        error = outcome(call)
        assert isinstance(error, WrongIdentity), (name, error)
        assert error.values == {"lease_number": str(lease.lease_number)}
    assert isinstance(outcome(lambda: acquired(stubs["named"], "stolen")), WrongIdentity)
    done = notified(stubs["reader"], read_done(lease.lease_id, 0))
    assert done.read_ended.verdict == pb.VERDICT_VALID


@pytest.mark.parametrize("other", ["its other node", "local"])
def test_read_is_shared_by_another_node_of_the_reader_and_the_unix_socket(stubs: Stubs, other: str) -> None:
    lease = acquired(stubs["reader"], other)
    assert acquired(stubs[other], other).lease_id == lease.lease_id
    for name, call in calls(stubs[other], other, lease.lease_id).items():
        assert outcome(call) is None, name


def test_certificate_without_alternative_names_is_known_by_its_common_name(stubs: Stubs) -> None:
    lease = acquired(stubs["named"], "common")
    assert isinstance(outcome(lambda: acquired(stubs["stranger"], "common")), WrongIdentity)
    assert acquired(stubs["named"], "common").lease_id == lease.lease_id


def test_certificate_without_any_name_is_known_by_its_digest(stubs: Stubs) -> None:
    lease = acquired(stubs["nameless"], "digest")
    assert isinstance(outcome(lambda: acquired(stubs["nameless, too"], "digest")), WrongIdentity)
    assert acquired(stubs["nameless"], "digest").lease_id == lease.lease_id
