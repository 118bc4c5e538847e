"""A directory in a real etcd: its readers, while listings come and end, and while etcd fails."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry import Directory, Listed, Listing
from kvferry._directory import etcd as etcd_module
from kvferry._directory.etcd import EtcdDirectory
from kvferry._directory.opening import open_directory
from kvferry.errors import DirectoryUnavailable
from tests.support.certificates import Authority
from tests.support.etcd import Etcd
from tests.support.node_servers import free_port
from tests.support.waiting import until

Open = Callable[[str], Directory]

HERE, THERE = "10.0.0.1:7423", "10.0.0.2:7423"


@pytest.fixture(autouse=True)
def emptied(etcd: Etcd) -> None:
    etcd.ctl("del", "--prefix", "/fleet/")


def lists(directory: Directory, engine_id: str) -> bool:
    return directory.wait() and directory.listed().find(engine_id) is not None


def renewed(*homes: Directory) -> bool:
    """Renew the listings of each publisher, or publish them again if their lease ended before all were written."""
    for home in homes:
        with suppress(DirectoryUnavailable):
            home.renew()
    return True


def test_published_engines_are_resolved_and_withdrawn(etcd: Etcd, opened: Open) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    assert reader.wait(30)
    told: list[Listed] = []
    reader.watch(told.append)
    first, second = Listing("prefill/0", HERE, b"i" * 16, {"role": "prefill"}), Listing("prefill 1", HERE)
    home.publish(HERE, [first, second], 30.0)
    until(lambda: lists(reader, "prefill 1"))
    assert reader.resolve("prefill/0") == first
    home.publish(HERE, [second], 30.0)
    until(lambda: not lists(reader, "prefill/0"))
    assert reader.listed() == Listed(frozenset({HERE}), (second,))
    home.withdraw()
    # Every watch receives each state once. The reader answers a moment before it calls the watches.
    until(lambda: reader.listed() == Listed() and told[-1] == Listed())
    assert told[-1] == Listed()
    assert all(before != after for before, after in pairwise(told))
    # No key is left, and another prefix was never touched.
    assert etcd.keys() == []


@pytest.mark.parametrize("name", ["/nowhere", "a%00b"])
def test_a_password_file_that_cannot_be_read_is_named(name: str) -> None:
    directory = open_directory(f"etcd://127.0.0.1:1/kvferry?user=root&password_file={name}")
    with directory, pytest.raises(DirectoryUnavailable, match="its password_file, cannot be read"):
        directory.publish(HERE, [], 30.0)


def test_prefix_may_have_any_characters(etcd: Etcd, opened: Open) -> None:
    url = f"etcd://{etcd.address}/fl%C3%B6te/a%20b"
    home, reader = opened(url), opened(url)
    listing = Listing("prefill/0 ö", HERE)
    home.publish(HERE, [listing], 30.0)
    until(lambda: lists(reader, listing.engine_id))
    assert reader.listed() == Listed(frozenset({HERE}), (listing,))
    home.withdraw()


def test_listings_that_are_not_renewed_end_with_their_ttl(etcd: Etcd, opened: Open) -> None:
    renewing, silent, reader = opened(etcd.url), opened(etcd.url), opened(etcd.url)
    renewing.publish(HERE, [Listing("stays", HERE)], 1.0)
    silent.publish(THERE, [Listing("ends", THERE)], 1.0)

    def begun() -> bool:
        """Both are renewed: otherwise they would end during steps of a second, such as a start of etcdctl."""
        return renewed(renewing, silent) and lists(reader, "stays") and lists(reader, "ends") and len(etcd.keys()) == 4

    until(begun)
    until(lambda: renewed(renewing) and not lists(reader, "ends") and lists(reader, "stays"))
    assert reader.resolve("stays").home == HERE
    assert reader.listed().homes == {HERE}


def test_engine_that_moved_is_found_at_its_newest_home(etcd: Etcd, opened: Open) -> None:
    old, new, reader = opened(etcd.url), opened(etcd.url), opened(etcd.url)
    old.publish(THERE, [Listing("moves", THERE, b"1" * 16)], 30.0)
    new.publish(HERE, [Listing("moves", HERE, b"2" * 16)], 30.0)
    until(lambda: reader.wait() and len(reader.listed().engines) == 2)
    assert reader.resolve("moves").home == HERE
    assert reader.resolve("moves", b"1" * 16).home == THERE
    old.withdraw()
    until(lambda: reader.listed().engines == (Listing("moves", HERE, b"2" * 16),))


def test_last_answers_stay_while_etcd_is_away_and_then_the_watch_goes_on(
    etcd: Etcd, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    home.publish(HERE, [Listing("before", HERE)], 30.0)
    until(lambda: lists(reader, "before"))
    with caplog.at_level(logging.INFO):
        etcd.stop()
        until(lambda: "cannot be read" in caplog.text)
        with pytest.raises(DirectoryUnavailable) as caught:
            home.publish(HERE, [Listing("before", HERE), Listing("after", HERE)], 30.0)
        assert caught.value.retryable
        assert etcd.address in caught.value.values["problem"]
        assert reader.resolve("before").home == HERE
        etcd.start()
        until(lambda: "answers again" in caplog.text)
    assert caplog.text.count("cannot be read") == 1

    def published() -> bool:
        try:
            home.renew()
        except DirectoryUnavailable:
            return False
        return True

    until(published)
    until(lambda: lists(reader, "after"))
    assert reader.resolve("before").home == HERE


def test_listings_that_ended_while_etcd_hung_are_published_again(
    etcd: Etcd, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    home.publish(HERE, [Listing("hangs", HERE)], 1.0)
    # Renewed: the reader may take longer than the ttl.
    until(lambda: renewed(home) and lists(reader, "hangs"))
    etcd.signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(etcd_module, "CALL_TIMEOUT", 1.0)
            with pytest.raises(DirectoryUnavailable):
                home.renew()
        # Looking up does not wait for an etcd that does not answer.
        assert reader.resolve("hangs").home == HERE
    finally:
        etcd.signal(signal.SIGCONT)
    until(lambda: not lists(reader, "hangs"))
    home.renew()
    until(lambda: renewed(home) and lists(reader, "hangs"))


def test_watch_that_begins_before_a_compaction_starts_over(
    etcd: Etcd, opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    home.publish(HERE, [Listing("early", HERE)], 30.0)
    asked: list[int] = []
    whole = EtcdDirectory._read_all

    def compacted_behind(directory: EtcdDirectory) -> int:
        revision = whole(directory)
        if not asked:
            home.publish(HERE, [Listing("late", HERE)], 30.0)
            home.publish(HERE, [Listing("late", HERE), Listing("last", HERE)], 30.0)
            now = etcd.ctl("get", "x", "-w", "fields").stdout.split('"Revision" : ')[1].split()[0]
            etcd.ctl("compact", now)
        asked.append(revision)
        return revision

    monkeypatch.setattr(EtcdDirectory, "_read_all", compacted_behind)
    until(lambda: lists(reader, "last"))
    assert len(asked) == 2
    assert not lists(reader, "early")
    # A compaction is no outage.
    assert "cannot be read" not in caplog.text


def test_large_directory_is_read_in_pages(etcd: Etcd, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "PAGE", 2)
    home, reader = opened(etcd.url), opened(etcd.url)
    engines = tuple(Listing(f"engine-{number}", HERE) for number in range(6))
    home.publish(HERE, engines, 30.0)
    assert reader.wait(30)
    assert reader.listed() == Listed(frozenset({HERE}), engines)


def test_entries_that_are_no_listings_do_not_affect_others(
    etcd: Etcd, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    for key, value in (
        ("/fleet/engines/x/y", "not JSON"),
        ("/fleet/engines/x/z", '{"engine_id": "x", "home": "unix:/run/kvferry/node.sock"}'),
        ("/fleet/homes/unix%3A%2Frun", "{}"),
        ("/fleet/homes/%FF", "{}"),
        ("/fleet/other", "{}"),
        ("/fleet", "{}"),
        ("/fleets/homes/10.0.0.9%3A1", "{}"),
    ):
        etcd.ctl("put", key, value)
    home.publish(HERE, [Listing("good", HERE)], 30.0)
    until(lambda: lists(reader, "good"))
    assert reader.listed() == Listed(frozenset({HERE}), (Listing("good", HERE),))
    # Each key is named by each reader; foreign keys are not mentioned.
    other = opened(etcd.url)
    until(lambda: lists(other, "good"))
    home.publish(HERE, [Listing("good", HERE), Listing("more", HERE)], 30.0)
    until(lambda: lists(reader, "more") and lists(other, "more"))
    named = [record.getMessage() for record in caplog.records if "is not a listing" in record.getMessage()]
    for key in ("'/fleet/engines/x/y'", "'/fleet/engines/x/z'", "'/fleet/homes/unix%3A%2Frun'", "'/fleet/homes/%FF'"):
        assert sum(key in line for line in named) == 2, key
    assert len(named) == 8


def test_engine_is_listed_only_under_its_own_key(etcd: Etcd, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    reader = opened(etcd.url)
    good = Listing("good", HERE)
    etcd.put("/fleet/engines/good/10.0.0.1%3A7423", good.to_json())
    # Another engine's name, another home's address, and another form of its own key.
    etcd.put("/fleet/engines/mine/10.0.0.1%3A7423", Listing("theirs", HERE).to_json())
    etcd.put("/fleet/engines/good/10.0.0.9%3A7423", good.to_json())
    etcd.put("/fleet/engines/goo%64/10.0.0.1%3A7423", good.to_json())
    # A directory below this one: its prefix is /fleet/engines.
    nested = opened(f"{etcd.url}/engines")
    nested.publish(THERE, [Listing("nested", THERE)], 30.0)
    until(lambda: lists(nested, "nested"))
    until(lambda: lists(reader, "good"))
    etcd.put("/fleet/homes/10.0.0.1%3A7423", b"{}")
    until(lambda: HERE in reader.listed().homes)
    assert reader.listed() == Listed(frozenset({HERE}), (good,))
    assert nested.listed() == Listed(frozenset({THERE}), (Listing("nested", THERE),))
    assert caplog.text.count("as the value says") == 3
    # A listing that becomes junk is no longer listed.
    etcd.put("/fleet/engines/good/10.0.0.1%3A7423", Listing("theirs", HERE).to_json())
    until(lambda: not reader.listed().engines)


def test_valid_listings_that_are_large_together_are_read(etcd: Etcd, opened: Open) -> None:
    # 4.2 kB each: a thousand of them do not fit an answer.
    home, reader = opened(etcd.url), opened(etcd.url)
    labels = {f"label-{number}": "x" * 256 for number in range(16)}
    engines = tuple(Listing(f"engine-{number:04}", HERE, labels=labels) for number in range(1100))
    home.publish(HERE, engines, 120.0)
    assert reader.wait(60)
    assert reader.listed().engines == engines


def test_change_costs_only_its_own_entry(etcd: Etcd, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    home, reader = opened(etcd.url), opened(etcd.url)
    home.publish(HERE, [Listing(f"engine-{number}", HERE) for number in range(50)], 60.0)
    until(lambda: lists(reader, "engine-49"))
    parsed: list[bytes] = []
    whole = Listing.from_json

    def counted(encoded: bytes) -> Listing:
        parsed.append(encoded)
        return whole(encoded)

    monkeypatch.setattr(Listing, "from_json", counted)
    again = [Listing(f"engine-{number}", HERE, b"2" * 16) for number in range(50)]
    home.publish(HERE, again, 60.0)
    until(lambda: reader.listed().engines == tuple(again))
    assert sorted(parsed) == sorted(listing.to_json() for listing in again)


def test_unreachable_endpoint_is_skipped(etcd: Etcd, opened: Open) -> None:
    url = f"etcd://127.0.0.1:{free_port()},{etcd.address}/fleet"
    home, reader = opened(url), opened(url)
    with pytest.raises(DirectoryUnavailable):
        home.publish(HERE, [Listing("a", HERE)], 30.0)
    home.renew()
    until(lambda: lists(reader, "a"))


def test_users_authenticate_with_the_password_in_a_file(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    with Etcd(tmp_path) as guarded:
        guarded.ctl("user", "add", "root:hunter2")
        guarded.ctl("user", "grant-role", "root", "root", check=False)
        guarded.ctl("auth", "enable")
        password.write_text("hunter1\n")
        url = f"{guarded.url}?user=root&password_file={password}"
        home, reader = opened(url), opened(url)
        for directory, problem in ((home, "authentication failed"), (opened(guarded.url), "user name is empty")):
            with pytest.raises(DirectoryUnavailable, match=problem) as caught:
                directory.publish(HERE, [], 30.0)
            assert "hunter1" not in f"{caught.value} {caught.value.values}"
        assert not reader.wait(0.5)
        # The password is corrected without a restart.
        password.write_text("hunter2\n")
        home.publish(HERE, [Listing("a", HERE)], 30.0)
        until(lambda: lists(reader, "a"))
        # A restarted etcd has forgotten its tokens.
        guarded.stop()
        guarded.start()
        home.publish(HERE, [Listing("b", HERE)], 30.0)
        until(lambda: lists(reader, "b"))
    assert "hunter" not in caplog.text


def test_etcd_over_tls_with_client_certificates(opened: Open, tmp_path: Path) -> None:
    ours, theirs = Authority.make(tmp_path, "ours"), Authority.make(tmp_path, "theirs")
    server, client = ours.issue("etcd"), ours.issue("client")
    with Etcd(tmp_path, server) as guarded:
        home = opened(f"{guarded.url}?ca={client.ca}&cert={client.cert}&key={client.key}")
        home.publish(HERE, [Listing("a", HERE)], 30.0)
        reader = opened(f"{guarded.url}?ca={client.ca}&cert={client.cert}&key={client.key}")
        until(lambda: lists(reader, "a"))
        stranger = opened(f"{guarded.url}?ca={theirs.certificate}")
        with pytest.raises(DirectoryUnavailable, match=guarded.address):
            stranger.publish(HERE, [], 30.0)
