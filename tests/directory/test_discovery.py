"""Clients and the command line use a directory, and reads go on without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, open_directory
from kvferry._control.homes import Homes
from kvferry._loop import Loop
from kvferry._wire.channel import connect
from kvferry._wire.reference import parse_reference
from kvferry.errors import DirectoryUnavailable, EngineNotListed, HomeNotAllowed
from tests.support.command_line import run_kvferry
from tests.support.etcd import Etcd
from tests.support.identifiers import unique_id
from tests.support.node_servers import Kvferryd, free_port
from tests.support.raw_parties import Party
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=16, num_blocks=8)
FAR = "10.0.0.7:7423"


@pytest.fixture(scope="module")
def fleet(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kvferryd, Kvferryd]]:
    """Two node servers that list themselves."""
    flags = ("--unix", "", "--listen", "127.0.0.1:0", "--drain", "0", "--directory", etcd.url)
    with Kvferryd(*flags) as first, Kvferryd(*flags) as second:
        yield first, second


def array(value: int) -> np.ndarray:
    return np.full((2, 8, 2, 16, 4), value, np.uint32)


def test_reads_by_references_without_an_address_and_without_etcd(etcd: Etcd, fleet: tuple[Kvferryd, Kvferryd]) -> None:
    source, destination = array(42), array(0)
    with (
        Client(fleet[0].address, home_in_references=False) as prefill,
        Client(fleet[1].address, directory=etcd.url) as decode,
        Client(fleet[1].address) as blind,
        open_directory(etcd.url) as seen,
    ):
        name = unique_id("prefill")
        theirs = prefill.register_cache(EngineSpec(name, (GROUP,)), tensors={"l": source}, axes=AXES)
        mine = decode.register_cache(EngineSpec(unique_id("decode"), (GROUP,)), tensors={"l": destination}, axes=AXES)
        until(lambda: seen.wait() and seen.listed().find(name) is not None)
        published = theirs.session.publish("request-1", {"full": Blocks([3])})
        assert parse_reference(published.reference).home == ""

        def listed() -> bool:
            try:
                mine.read(published.reference, {"full": Blocks([5])}).result(30)
            except EngineNotListed:
                return False
            return True

        until(listed)
        assert (destination[:, 5] == 42).all()
        with pytest.raises(EngineNotListed, match="this client has no directory"):
            blind.decline(published.reference)
        # Its outage stops discovery only: known homes stay in use, by references of both kinds.
        etcd.stop()
        try:
            again = theirs.session.publish("request-2", {"full": Blocks([3])})
            assert mine.read(again.reference, {"full": Blocks([6])}).result(30).confirmed
            assert (destination[:, 6] == 42).all()
        finally:
            etcd.start()


def test_reads_by_references_with_an_address_need_no_directory(fleet: tuple[Kvferryd, Kvferryd]) -> None:
    nowhere = f"etcd://127.0.0.1:{free_port()}/fleet"
    source, destination = array(7), array(0)
    with Client(fleet[0].address) as prefill, Client(fleet[1].address, directory=nowhere) as decode:
        theirs = prefill.register_cache(EngineSpec(unique_id("prefill"), (GROUP,)), tensors={"l": source}, axes=AXES)
        mine = decode.register_cache(EngineSpec(unique_id("decode"), (GROUP,)), tensors={"l": destination}, axes=AXES)
        published = theirs.session.publish("request-1", {"full": Blocks([3])})
        mine.read(published.reference, {"full": Blocks([5])}).result(30)
        assert (destination[:, 5] == 7).all()


def test_directory_allows_the_homes_that_it_lists(file: Path) -> None:
    # No call is made.
    loop = Loop()
    file.write_text(f'homes = ["{FAR}"]')
    homes = Homes("127.0.0.1:1", loop, None, (), directory=open_directory(f"file:{file}"))
    homes.discover()
    assert homes.get(FAR).address == FAR
    with pytest.raises(HomeNotAllowed, match="neither in this client's directory nor covered by TLS"):
        homes.get("10.0.0.8:7423")
    homes.close()
    # A directory that has not answered yet forbids no home for good: the error asks to try again.
    unread = Homes("127.0.0.1:1", loop, None, ("10.0.0.9:*",), directory=open_directory(f"file:{file}.missing"))
    assert unread.get("10.0.0.9:7423").address == "10.0.0.9:7423"
    with pytest.raises(DirectoryUnavailable) as caught:
        unread.get(FAR)
    assert caught.value.retryable
    unread.close()


def test_engines_of_a_fleet_are_listed_together(etcd: Etcd, fleet: tuple[Kvferryd, Kvferryd]) -> None:
    with connect(fleet[0].address) as one, connect(fleet[1].address) as other:
        parties = [Party(one, "on-the-first"), Party(other, "on-the-second")]
        for party in parties:
            party.works()
        both = [part for server in fleet for part in ("--server", server.address)]
        # Node servers list themselves and their engines a moment after they begin to serve.
        with open_directory(etcd.url) as seen:
            until(lambda: seen.wait() and seen.listed().homes >= {server.advertise for server in fleet})
            until(lambda: all(seen.listed().find(party.name) is not None for party in parties))
        for arguments in (["--all", "--directory", etcd.url], both):
            done = run_kvferry("engines", *arguments)
            assert done.returncode == 0, done.stderr
            rows = [line.split() for line in done.stdout.splitlines()]
            assert ["Engine", "Home"] in [row[:2] for row in rows]
            for party, server in zip(parties, fleet, strict=True):
                assert [party.name, server.advertise] in [row[:2] for row in rows]
        done = run_kvferry("engine", parties[1].name, KVFERRY_DIRECTORY=etcd.url)
        assert done.returncode == 0, done.stderr
        assert parties[1].ref.incarnation.hex() in done.stdout
        done = run_kvferry("engine", "nobody", "--directory", etcd.url)
        assert done.returncode == 1
        assert "EngineNotListed" in done.stderr
        for party in parties:
            party.close()


def test_unreachable_home_is_named_and_the_others_are_shown(file: Path, fleet: tuple[Kvferryd, Kvferryd]) -> None:
    away = f"127.0.0.1:{free_port()}"
    file.write_text(f'homes = ["{fleet[0].advertise}", "{away}"]')
    done = run_kvferry("engines", "--all", "--directory", f"file:{file}")
    assert done.returncode == 1
    assert done.stderr.count(away) >= 1
    assert fleet[0].advertise not in done.stderr
    done = run_kvferry("engines", "--all", "--json", KVFERRY_DIRECTORY=f"file:{file}")
    assert done.returncode == 1
    answered, failed = sorted(json.loads(done.stdout)["homes"], key=lambda home: "error" in home)
    assert answered["server"] == fleet[0].advertise
    assert set(answered["response"]) == {"home_epoch", "engines", "recovering"}
    assert (failed["server"], failed["error"]["reason"]) == (away, "UNREACHABLE")


def test_fleet_needs_a_directory_that_answers(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_kvferry("engines", "--all").returncode == 2
    assert run_kvferry("engines", "--all", "--directory", "file:relative").returncode == 2
    done = run_kvferry("engines", "--all", "--directory", f"file:{file}", "--timeout", "0.2")
    assert done.returncode == 1
    assert "DirectoryUnavailable" in done.stderr
    assert f"file:{file}" in done.stderr
    # Reported once: without a logging setup, warnings would be on stderr, too.
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
