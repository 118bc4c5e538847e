"""A node server lists itself and its engines in a real etcd, and withdraws them. Without etcd it also serves."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry import Directory, Listing, open_directory
from kvferry._directory.etcd import EtcdDirectory
from kvferry._wire.channel import connect
from kvferry_server.node.listings import Listings
from kvferry_server.node.loading import BadConfig, configure
from kvferry_server.node.server import NodeServer
from tests.support.etcd import Etcd
from tests.support.node_servers import Kvferryd, refused, serves
from tests.support.raw_parties import Party
from tests.support.waiting import until


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def reader(etcd: Etcd) -> Iterator[Directory]:
    directory = open_directory(etcd.url)
    yield directory
    directory.close()


def listing(etcd: Etcd, *flags: str) -> Kvferryd:
    return Kvferryd(
        *("--unix", "", "--listen", "127.0.0.1:0", "--directory", etcd.url, "--directory-ttl", "2"),
        *("--engine-ttl", "0.5", "--drain", "0", *flags),
    )


def test_engines_are_listed_while_they_live_and_homes_while_they_serve(etcd: Etcd, reader: Directory) -> None:
    with listing(etcd, "--directory-labels", "role=prefill, rack=a7") as server, connect(server.address) as channel:
        until(lambda: reader.wait() and reader.listed().homes == {server.advertise})
        party = Party(channel, "listed")
        party.works()
        until(lambda: reader.listed().find(party.name) is not None)
        found = reader.resolve(party.name)
        assert (found.home, found.incarnation) == (server.advertise, bytes(party.ref.incarnation))
        assert dict(found.labels) == {"model": "m", "role": "prefill", "rack": "a7"}
        # A directory holds no secret.
        held = etcd.ctl("get", "--prefix", "").stdout.encode()
        for secret in (party.secret, party.reference().encode(), party.lease_id):
            assert secret not in held
            assert secret.hex().encode() not in held
        party.close()
        until(lambda: reader.listed().find(party.name) is None)
        assert reader.listed().homes == {server.advertise}
        server.signal(signal.SIGTERM)
        server.wait()
        # The server withdraws its listings at once, long before any ttl.
        assert etcd.keys() == []
    assert "not listed" not in server.log


def test_killed_server_is_listed_until_its_ttl_ends(etcd: Etcd, reader: Directory) -> None:
    with listing(etcd) as server:
        until(lambda: reader.wait() and server.advertise in reader.listed().homes)
        server.kill()
        # Asked of this process's directory: until etcdctl has started, the ttl may be over.
        assert server.advertise in reader.listed().homes
        until(lambda: reader.listed().homes == set())


def test_server_without_etcd_serves_and_lists_its_engines_once_etcd_is_there(etcd: Etcd, reader: Directory) -> None:
    etcd.stop()
    with listing(etcd) as server, connect(server.address) as channel:
        until(lambda: "engines are not listed" in server.log)
        assert serves(server.address)
        # Kept: an unreferenced Watch is cancelled, and its engine ends before there is an etcd.
        party = Party(channel, "unlisted")
        party.works()
        etcd.start()
        until(lambda: "engines are listed again" in server.log)
        until(lambda: reader.wait() and any(listing.home == server.advertise for listing in reader.listed().engines))
        # Once per outage.
        assert server.log.count("not listed") == 1
        # A hanging etcd does not keep a server from stopping; the log says that the listings end with their ttl.
        etcd.signal(signal.SIGSTOP)
        try:
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        finally:
            etcd.signal(signal.SIGCONT)
    until(lambda: etcd.keys() == [])


async def test_listings_continue_after_any_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the system may refuse a thread to gRPC."""
    attempts: list[str] = []

    def publish(_: EtcdDirectory, home: str, *__: object) -> None:
        attempts.append(home)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(EtcdDirectory, "publish", publish)
    monkeypatch.setattr(EtcdDirectory, "withdraw", lambda _: None)
    monkeypatch.setattr("kvferry_server.node.listings.RETRY_FIRST", 0.01)
    server = NodeServer(configure(listen="127.0.0.1:0", unix="", directory="etcd://127.0.0.1:1"))
    await server.start()
    try:
        await asyncio.to_thread(until, lambda: len(attempts) == 2)
    finally:
        await server.stop(0)
    assert set(attempts) == {server.advertise}


async def test_listings_are_written_once_renewed_in_time_and_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("publish", "renew", "withdraw"):
        monkeypatch.setattr(EtcdDirectory, name, lambda *_, name=name: calls.append(name))
    server = NodeServer(configure(listen="127.0.0.1:0", unix="", directory="etcd://127.0.0.1:1", directory_ttl=2))
    await server.start()
    try:
        await asyncio.to_thread(until, lambda: "renew" in calls)
        # A home that drains is listed until it stops.
        await server.drain()
        so_far = len(calls)
        await asyncio.to_thread(until, lambda: len(calls) > so_far)
    finally:
        await server.stop(0)
    assert (calls[0], {*calls[1:-1]}, calls[-1]) == ("publish", {"renew"}, "withdraw")


async def test_listings_that_return_after_a_failed_change_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt may have written a part of the change, and the directory would renew it."""
    wanted: list[tuple[Listing, ...]] = [()]
    calls: list[object] = []

    def publish(_: EtcdDirectory, home: str, engines: tuple[Listing, ...], ttl: float) -> None:
        calls.append(engines)
        if engines:
            wanted[0] = ()
            raise RuntimeError("in the middle of the change")

    monkeypatch.setattr(EtcdDirectory, "publish", publish)
    monkeypatch.setattr(EtcdDirectory, "renew", lambda _: calls.append("renew"))
    monkeypatch.setattr(EtcdDirectory, "withdraw", lambda _: None)
    monkeypatch.setattr(Listings, "_engines", lambda _: wanted[0])
    server = NodeServer(configure(listen="127.0.0.1:0", unix="", directory="etcd://127.0.0.1:1"))
    await server.start()
    try:
        await asyncio.to_thread(until, lambda: calls == [()])
        come = (Listing("engine", server.advertise),)
        wanted[0] = come
        await asyncio.to_thread(until, lambda: len(calls) == 3)
    finally:
        await server.stop(0)
    assert calls == [(), come, ()]


async def test_server_stops_although_its_directory_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, closed = threading.Event(), threading.Event()

    def publish(*_: object) -> None:
        entered.set()
        closed.wait(60)
        raise RuntimeError("closed")

    monkeypatch.setattr(EtcdDirectory, "publish", publish)
    monkeypatch.setattr(EtcdDirectory, "close", lambda _: closed.set())
    monkeypatch.setattr("kvferry_server.node.listings.WITHDRAW_PATIENCE", 0.1)
    server = NodeServer(configure(listen="127.0.0.1:0", unix="", directory="etcd://127.0.0.1:1"))
    await server.start()
    await asyncio.to_thread(entered.wait, 30)
    await asyncio.wait_for(server.stop(0), 30)
    assert closed.is_set()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "kvferry-listings"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"directory": "file:/etc/kvferry.toml"}, "files are written by others"),
        ({"directory": "etcd:2379"}, "etcd://HOST:PORT"),
        ({"directory": "etcd://e:1", "directory_labels": "role"}, "NAME=VALUE"),
        ({"directory": "etcd://e:1", "directory_ttl": 0.5}, "greater than or equal to 2"),
    ],
)
def test_directory_settings_that_list_nothing_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        configure(**settings)


def test_server_that_no_other_host_reaches_is_not_listed(tmp_path: Path) -> None:
    done = refused("--listen", "", "--unix", f"{tmp_path}/node.sock", "--directory", "etcd://127.0.0.1:1")
    assert done.returncode == 2
    assert "as other hosts reach it" in done.stderr
