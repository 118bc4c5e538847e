"""Valid listings, the choice between several listings of an engine, and the URLs of directories."""

from __future__ import annotations

import json

import pytest

from kvferry import Listed, Listing, open_directory
from kvferry._directory.directory import MAX_ENTRY_BYTES
from kvferry.errors import InvalidField, WrongState

HERE, THERE = "10.0.0.1:7423", "10.0.0.2:7423"


def test_listing_survives_its_encoding_and_a_later_version() -> None:
    listing = Listing("prefill/0", HERE, b"i" * 16, {"role": "prefill"})
    assert Listing.from_json(listing.to_json()) == listing
    more = {**json.loads(listing.to_json()), "zone": [1]}
    assert Listing.from_json(json.dumps(more).encode()) == listing


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 10_000,
        b" " * (MAX_ENTRY_BYTES + 1),
        b'{"engine_id": "a", "home": "unix:/run/kvferry/node.sock"}',
        b'{"engine_id": "a", "home": "10.0.0.1:0"}',
        b'{"engine_id": "a", "home": 7}',
        b'{"engine_id": "", "home": "10.0.0.1:1"}',
        b'{"engine_id": "a", "home": "10.0.0.1:1", "incarnation": "no hex"}',
        b'{"engine_id": "a", "home": "10.0.0.1:1", "labels": {"a": 1}}',
        b'{"engine_id": "a", "home": "10.0.0.1:1", "labels": {"a": "\\u001b[2J"}}',
        b'{"engine_id": "a", "home": "10.0.0.1\\u001b[2J:1"}',
    ],
)
def test_listings_that_are_malformed_are_refused_with_a_typed_error(entry: bytes) -> None:
    with pytest.raises(InvalidField):
        Listing.from_json(entry)


def test_newest_listing_is_found_unless_another_has_the_incarnation() -> None:
    old, new = Listing("a", HERE, b"1" * 16), Listing("a", THERE, b"2" * 16)
    listed = Listed(frozenset({HERE}), (old, new))
    assert listed.find("a") == new
    assert listed.find("a", b"1" * 16) == old
    # The home of another incarnation answers that the engine has restarted.
    assert listed.find("a", b"3" * 16) == new
    assert listed.find("b") is None
    assert listed.covers(HERE)
    assert listed.covers(THERE)
    assert not listed.covers("10.0.0.3:7423")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:2379",
        "http://etcd:2379",
        "file:relative.toml",
        "file://elsewhere/directory.toml",
        "dns:///homes",
        "etcd://",
        "etcd:///kvferry",
        "etcd://etcd",
        "etcd://etcd:2379?user=kvferry",
        "etcd://etcd:2379?ca=/ca.pem",
        "etcd://etcd:2379?colour=red",
        "etcds://etcd:2379?cert=/cert.pem",
        "etcd://[::1:2379",
        "etcd://" + ",".join(["etcd:1"] * 17),
    ],
)
def test_urls_that_name_no_directory_are_refused(url: str) -> None:
    with pytest.raises(InvalidField):
        open_directory(url)


@pytest.mark.parametrize("url", ["etcd://me:hunter2@etcd:2379/fleet", "etcd://etcd:2379/fleet?password=hunter2"])
def test_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        open_directory(url)
    assert "hunter2" not in f"{caught.value} {caught.value.values}"
    assert "password_file" in caught.value.message


def test_file_directories_refuse_to_publish() -> None:
    directory = open_directory("file:/nowhere.toml")
    with pytest.raises(WrongState, match="written by others"):
        directory.publish(HERE, [], 5.0)
    with pytest.raises(WrongState, match="written by others"):
        directory.renew()
    with pytest.raises(WrongState, match="written by others"):
        directory.withdraw()
