"""Certificates, and the authority that signs them, are replaced while reads run: none fails, and nothing restarts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry._wire.channel import TlsConfig, read_tls
from kvferry._wire.tls_files import tls_files
from kvferry.errors import KvferryError, NotAllowed, ServerDraining
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef
from tests.support.blocking_control import BlockingControl
from tests.support.certificates import Authority, replace_files, tls_flags
from tests.support.identifiers import unique_id
from tests.support.node_servers import Kvferryd, serves
from tests.support.parties import SECRETS, E, P
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOKENS, BLOCKS = 16, 8
GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
AXES = ("kv", "block", "head", "token", "content")
SHARED = "URI:spiffe://fleet/engine"
HERE = "DNS:localhost,IP:127.0.0.1"
EVERYTHING = "engine = ['*']\nreader = ['*']\nrelay = ['*']\nobserver = true\n"


def paths(folder: Path) -> TlsConfig:
    folder.mkdir()
    return TlsConfig(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem")))


def with_authorities(files: TlsConfig, *authorities: Authority) -> TlsConfig:
    """The same certificate, beside a bundle of authorities."""
    bundle = authorities[0].folder / f"bundle-{'-'.join(each.name for each in authorities)}.pem"
    bundle.write_bytes(b"".join(each.certificate.read_bytes() for each in authorities))
    return TlsConfig(ca=bundle, cert=files.cert, key=files.key)


@dataclass
class Fleet:
    """A node server, and files of its own for it and for its clients."""

    old: Authority
    new: Authority
    servers: TlsConfig
    clients: TlsConfig
    policy: Path
    node: Kvferryd = field(init=False)

    def reload(self) -> None:
        """Make the server read its files, and wait until it has."""
        times = self.node.log.count("was read again from")
        self.node.signal(signal.SIGHUP)
        until(lambda: self.node.log.count("was read again from") >= times + 2)

    def clients_know(self) -> None:
        """Wait until the clients' next calls use what their files hold."""
        tls_files(self.clients).look_soon()
        until(lambda: tls_files(self.clients).content() == read_tls(self.clients))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    old, new = Authority.make(tmp_path, "old"), Authority.make(tmp_path, "new")
    made = Fleet(old, new, paths(tmp_path / "server"), paths(tmp_path / "client"), tmp_path / "policy.toml")
    replace_files(old.issue("node"), made.servers)
    replace_files(old.issue("client", SHARED), made.clients)
    made.policy.write_text(f"[[rule]]\nidentities = ['**']\n{EVERYTHING}")
    flags = [*tls_flags(made.servers), "--policy", str(made.policy), "--drain", "0"]
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags) as made.node:
        yield made


class Readers:
    """Reads one publication after the other, each checked, until it is told to stop."""

    def __init__(self, client: Client) -> None:
        self.theirs, self.mine = (np.zeros((2, BLOCKS, 2, TOKENS, 4), np.uint32) for _ in range(2))
        self.source, self.destination = (
            client.register_cache(EngineSpec(unique_id(name), (GROUP,)), tensors={"l": memory}, axes=AXES)
            for name, memory in (("source", self.theirs), ("destination", self.mine))
        )
        self.done, self.failures = 0, list[BaseException]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go_on(self, reads: int = 5) -> None:
        """Wait for further reads."""
        before = self.done
        until(lambda: self.done >= before + reads or bool(self.failures))
        assert self.failures == []

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                number = self.done + 1
                self.theirs[:, 1] = number
                publication = self.source.session.publish(f"request-{number}", {"full": Blocks([1])})
                self.destination.read(publication.reference, {"full": Blocks([2])}).result(30)
                assert (self.mine[:, 2] == number).all()
                self.done = number
        except BaseException as error:
            self.failures.append(error)


def test_reads_go_on_while_certificates_and_their_authority_are_replaced(fleet: Fleet) -> None:
    old, new, address = fleet.old, fleet.new, fleet.node.advertise
    of_old, of_new = old.issue("somebody", SHARED), new.issue("somebody", SHARED)
    with Client(address, tls=fleet.clients) as client:
        readers = Readers(client)
        readers.go_on()

        # The same authority signs new ones.
        replace_files(old.issue("node-2"), fleet.servers)
        fleet.reload()
        replace_files(old.issue("client-2", f"{SHARED},DNS:second"), fleet.clients)
        fleet.clients_know()
        readers.go_on()

        # Both sides trust the new authority as well, then use it, then trust it alone.
        for certificates, authorities in ((old, (old, new)), (new, (old, new)), (new, (new,))):
            replace_files(with_authorities(certificates.issue("node-3"), *authorities), fleet.servers)
            fleet.reload()
            readers.go_on()
            newest = certificates.issue("client-3", f"{SHARED},DNS:newest")
            replace_files(with_authorities(newest, *authorities), fleet.clients)
            fleet.clients_know()
            readers.go_on()

        # Nobody who still used an old certificate could go on from here.
        fleet.policy.write_text(f"[[rule]]\nidentities = ['newest']\n{EVERYTHING}")
        fleet.reload()
        readers.go_on()
        readers.stop()
        assert readers.failures == []
    assert serves(address, of_new)
    with pytest.raises(grpc.RpcError):
        serves(address, TlsConfig(ca=new.certificate, cert=of_old.cert, key=of_old.key))


def test_calls_in_progress_outlive_the_channel_that_later_calls_use(fleet: Fleet) -> None:
    fleet.policy.write_text(
        "[[rule]]\nidentities = ['first']\nengine = ['*']\n[[rule]]\nidentities = ['second']\nreader = ['*']\n"
    )
    replace_files(fleet.old.issue("first", "DNS:first"), fleet.clients)
    fleet.reload()
    control = BlockingControl(fleet.node.advertise, fleet.clients)
    reader = pb.EngineRef(engine_id="reader", incarnation=b"r" * 16)
    geometry = pb.HandshakeRequest(engine_id="nobody", reader=reader)
    try:
        fleet.clients_know()
        engine = pb.EngineRef(engine_id=P.engine_id, incarnation=P.incarnation)
        events = control.watch(pb.WatchRequest(engine=engine, session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER))
        while next(events).WhichOneof("event") != "synced":
            pass
        with pytest.raises(NotAllowed):
            control.handshake(geometry, 10.0)

        assert fleet.clients.key is not None
        whole = fleet.clients.key.read_bytes()
        fleet.clients.key.write_bytes(whole[:50])
        # What cannot be used changes nothing.
        tls_files(fleet.clients).look_soon()
        with pytest.raises(NotAllowed, match="first"):
            control.handshake(geometry, 10.0)

        replace_files(fleet.old.issue("second", "DNS:second"), fleet.clients)
        # Without a failure that would make them look, clients look once a second.
        until(lambda: tls_files(fleet.clients).content() == read_tls(fleet.clients))
        with pytest.raises(KvferryError) as caught:
            control.handshake(geometry, 10.0)
        assert not isinstance(caught.value, NotAllowed)
        # The Watch goes on where it was opened, until the server ends it.
        fleet.node.signal()
        with pytest.raises(ServerDraining):
            next(events)
    finally:
        control.close()


def test_a_relay_shows_its_new_certificate_to_homes_and_what_it_relays_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    """The policy of the home lets only the newer certificate relay for the other engine."""
    fleet.policy.write_text(
        f"[[rule]]\nidentities = ['{SHARED.removeprefix('URI:')}']\nengine = ['*']\n"
        f"[[rule]]\nidentities = ['older.example']\nrelay = ['{P.engine_id}']\n"
        "[[rule]]\nidentities = ['newer.example']\nrelay = ['*']\n"
    )
    fleet.reload()
    files = replace_files(fleet.old.issue("relay", f"{HERE},DNS:older.example"), paths(tmp_path / "relay"))
    flags = ["--listen", "127.0.0.1:0", "--unix", str(tmp_path / "relay.sock"), *tls_flags(files), "--drain", "0"]
    with Kvferryd(*flags) as relay:
        home, node = BlockingControl(fleet.node.advertise, fleet.clients), BlockingControl(relay.address)

        def watch(ref: EngineRef, at: BlockingControl) -> Any:
            """Open a Watch: of the scheduler at its home, or of a rank elsewhere."""
            engine = pb.EngineRef(engine_id=ref.engine_id, incarnation=ref.incarnation)
            role = pb.WATCH_ROLE_SCHEDULER if at is home else pb.WATCH_ROLE_RANK
            elsewhere = "" if at is home else fleet.node.advertise
            request = pb.WatchRequest(engine=engine, session_secret=SECRETS[ref], role=role, home=elsewhere)
            stream = at.watch(request)
            assert next(stream).WhichOneof("event") == "opened"
            return stream

        try:
            kept = [watch(P, home), watch(E, home), watch(P, node)]
            with pytest.raises(NotAllowed, match=r"older\.example.*role relay"):
                watch(E, node)
            replace_files(fleet.old.issue("relay-2", f"{HERE},DNS:newer.example"), files)
            until(lambda: "new certificate" in relay.log)
            kept.append(watch(E, node))
            found = [call for at in (home, node) for call in at.control.calls()]
            calls: list[Any] = [call for call in found if not isinstance(call, threading.Thread)]
            # That of the Watch that was refused may still be known.
            assert sum(call.is_active() for call in calls) == len(kept) == 4
        finally:
            home.close()
            node.close()
