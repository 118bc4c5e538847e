"""Certificates follow their files, and a server that cannot use new files keeps its certificate."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry._wire.channel import TlsConfig, read_tls
from kvferry._wire.tls_files import TlsFiles, Validity, authorities_validity, own_validity
from kvferry.errors import InvalidField
from kvferry_server.node.certificates import Certificates
from kvferry_server.node.loading import BadConfig, configure, file_problems, load
from kvferry_server.node.server import NodeServer
from tests.support.admin_listeners import Scraped
from tests.support.certificates import Authority, replace_files, tls_flags
from tests.support.node_servers import Kvferryd, refused, serves
from tests.support.waiting import until

DAY = 86_400.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("fleet"), "fleet")


@pytest.fixture
def files(fleet: Authority, tmp_path: Path) -> TlsConfig:
    """Copies, for a test to change."""
    return replace_files(
        fleet.issue("node"), TlsConfig(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    )


def test_certificate_and_key_that_do_not_match_change_nothing_and_are_logged_once(
    fleet: Authority, files: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    certificates, newer = Certificates(files), fleet.issue("newer")
    old = certificates.content()
    assert files.cert is not None
    assert newer.cert is not None
    for content, says in (
        (newer.cert.read_bytes(), "tls_key"),
        (newer.cert.read_bytes()[:300], "tls_cert"),
        (b"", "PEM"),
    ):
        files.cert.write_bytes(content)
        caplog.clear()
        for _ in range(3):
            assert not certificates.refresh()
        assert certificates.content() is old
        (line,) = caplog.messages
        assert says in line
        assert "PRIVATE KEY" not in line
    # The rest of the file arrives.
    replace_files(newer, files)
    assert certificates.refresh()
    assert certificates.content() == read_tls(newer)


def test_certificate_that_is_not_valid_yet_is_used_once_it_is(
    fleet: Authority, files: TlsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As from an authority whose clock is ahead. Clients would refuse it, and still accept the former certificate."""
    older, newer, restored = (fleet.issue(name) for name in ("older", "newer", "restored"))
    dates = {older: (0.0, 100.0), newer: (50.0, 200.0), restored: (0.0, 55.0)}
    valid = {read_tls(tls): Validity(*between) for tls, between in dates.items()}
    for module in ("kvferry._wire.tls_files", "kvferry_server.node.certificates"):
        monkeypatch.setattr(f"{module}.own_validity", lambda tls: valid[read_tls(tls)])
    wall = [40.0]
    certificates = Certificates(replace_files(older, files), lambda: wall[0])
    replace_files(newer, files)
    assert not certificates.refresh()
    assert certificates.content() == read_tls(older)
    assert "valid now" in caplog.text
    wall[0] = 60.0
    assert certificates.refresh()
    assert certificates.content() == read_tls(newer)
    replace_files(restored, files)
    assert not certificates.refresh()
    assert certificates.content() == read_tls(newer)
    # If both have expired, the new certificate is no worse.
    wall[0] = 200.0
    assert certificates.refresh()


def test_certificate_that_only_openssl_can_read_changes_nothing(
    fleet: Authority, files: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC would refuse each new connection with it."""
    certificates = Certificates(files)
    old = certificates.content()
    assert files.cert is not None
    command = ["openssl", "x509", "-in", f"{files.cert}", "-trustout"]
    trusted = subprocess.run(command, check=True, capture_output=True, timeout=30).stdout
    assert b"BEGIN TRUSTED CERTIFICATE" in trusted
    files.cert.write_bytes(trusted)
    assert not certificates.refresh()
    assert certificates.content() is old
    assert "BEGIN CERTIFICATE" in caplog.text
    with pytest.raises(InvalidField, match="tls_cert"):
        Certificates(files)
    loaded = load({"tls_cert": str(files.cert), "tls_key": str(files.key)}, None)
    assert [line.partition(" ")[0] for line in file_problems(loaded)] == ["tls_cert"]


def test_chain_is_valid_as_long_as_all_its_certificates_are(fleet: Authority, tmp_path: Path) -> None:
    node = fleet.issue("node-of-9", days=9)
    above = Authority.make(tmp_path, "above", 5)
    assert node.cert is not None
    chain = tmp_path / "chain.pem"
    chain.write_bytes(node.cert.read_bytes() + above.certificate.read_bytes())
    alone = Certificates(TlsConfig(cert=node.cert, key=node.key)).expiry
    assert alone is not None
    assert Certificates(TlsConfig(cert=chain, key=node.key)).expiry == pytest.approx(alone - 4 * DAY, abs=60)


def test_warning_precedes_the_expiry_of_a_certificate_and_repeats_after_half_of_the_time(
    fleet: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    wall = [0.0]
    # Valid for two days, so that the first warning comes a quarter of that before the end.
    certificates = Certificates(fleet.issue("short"), lambda: wall[0])
    expiry = certificates.expiry
    assert expiry is not None
    told = []
    for left in (2 * DAY, 0.6 * DAY, 0.4 * DAY, 0.3 * DAY, 0.1 * DAY, 60.0, 40.0, 20.0, 1.0, -1.0, -DAY):
        wall[0] = expiry - left
        caplog.clear()
        certificates.warn()
        told += [(left, record.levelno) for record in caplog.records if record.message.startswith("the certificate")]
    warned, failed = logging.WARNING, logging.ERROR
    assert told == [
        (0.4 * DAY, warned), (0.1 * DAY, warned), (60.0, warned), (20.0, warned), (1.0, warned), (-1.0, failed)
    ]  # fmt: skip


def test_a_renewed_authority_in_the_chain_delays_no_warning(
    fleet: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, renewed = fleet.issue("short"), list[Validity]()
    monkeypatch.setattr("kvferry._wire.tls_files._authorities", lambda _: renewed)
    for of in (TlsFiles, Certificates):
        renewed.clear()
        alone = own_validity(tls)
        assert alone is not None
        # It began when less than a third of the time was left, and less than a quarter is left now.
        renewed.append(Validity(alone.end - 0.6 * DAY, alone.end + 9 * DAY, "above"))
        caplog.clear()
        files = of(tls, partial(float, alone.end - 0.4 * DAY))
        files.content()
        files.warn()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_warning_precedes_the_expiry_of_an_authority(
    fleet: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the authority that ends first; an authority with a successor of the same name does not
    count."""
    wall, node = [0.0], fleet.issue("node", days=20)
    made = {days: Authority.make(tmp_path, f"of-{days}", days) for days in (5, 9)}
    older = Authority.make(tmp_path, "older", 1, subject="of-5")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(b"".join(one.certificate.read_bytes() for one in (*made.values(), older)))
    certificates = Certificates(TlsConfig(ca=bundle, cert=node.cert, key=node.key), lambda: wall[0])
    expiry = certificates.authorities_expiry
    assert expiry is not None
    told = []
    for left in (3 * DAY, 1.5 * DAY, 1.0 * DAY, 0.5 * DAY, -1.0, -DAY):
        wall[0] = expiry - left
        caplog.clear()
        certificates.warn()
        told += [(left, record.levelno) for record in caplog.records if "the authority 'of-5' in" in record.message]
    # A quarter of five days.
    assert told == [(1.0 * DAY, logging.WARNING), (0.5 * DAY, logging.WARNING), (-1.0, logging.ERROR)]
    # Without its successor the authority does count.
    bundle.write_bytes(made[9].certificate.read_bytes() + older.certificate.read_bytes())
    assert certificates.refresh()
    assert certificates.authorities_expiry == pytest.approx(expiry - 4 * DAY, abs=60)
    assert Certificates(TlsConfig(cert=node.cert, key=node.key)).authorities_expiry is None


@pytest.mark.parametrize("usage", ["", "extendedKeyUsage=clientAuth"])
def test_client_warns_before_its_own_certificate_expires(
    fleet: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, usage: str
) -> None:
    wall = [0.0]
    authority = Authority.make(tmp_path, "long", 90)
    client = authority.issue("client", usages=usage)
    short, longer = own_validity(client), own_validity(authority.issue("longer", days=3))
    assert short is not None
    assert longer is not None
    assert longer.end == pytest.approx(short.end + DAY, abs=60)
    files = TlsFiles(client, lambda: wall[0])
    told = []
    for left in (DAY, 0.4 * DAY, 0.3 * DAY, 0.1 * DAY, -1.0, -DAY):
        wall[0] = short.end - left
        caplog.clear()
        files.look_soon()
        files.content()
        told += [(left, "expired" in record.message) for record in caplog.records if str(client.cert) in record.message]
    assert told == [(0.4 * DAY, False), (0.1 * DAY, False), (-1.0, True)]


def test_client_warns_before_the_authority_of_its_homes_expires(
    fleet: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    found = authorities_validity(fleet.certificate.read_bytes())
    assert found is not None
    files = TlsFiles(TlsConfig(ca=fleet.certificate), lambda: found.end - 60)
    files.content()
    assert "the authority 'fleet' in" in caplog.text


async def test_node_server_shows_when_its_certificate_and_authorities_expire(files: TlsConfig) -> None:
    settings = {"listen": "127.0.0.1:0", "unix": "", "admin": "127.0.0.1:0"}
    server = NodeServer(configure(**settings, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca))
    await server.start()
    try:
        read = Certificates(files)
        seen = await asyncio.to_thread(Scraped, server.admin)
        assert seen("kvferry_certificate_expiry_timestamp_seconds") == read.expiry
        assert seen("kvferry_authority_expiry_timestamp_seconds") == read.authorities_expiry
    finally:
        await server.stop(0)


@pytest.mark.slow
def test_server_follows_its_tls_files_by_polling_and_at_once_on_reload(
    fleet: Authority, files: TlsConfig, tmp_path: Path
) -> None:
    later = Authority.make(tmp_path, "later")
    client, newcomer = fleet.issue("client"), later.issue("client")
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *tls_flags(files)) as server:
        assert serves(server.advertise, client)
        replace_files(later.issue("node"), files)
        until(lambda: "new certificate" in server.log)
        assert serves(server.advertise, newcomer)
        assert files.key is not None
        files.key.write_text("half of a -----BEGIN")
        server.signal(signal.SIGHUP)
        until(lambda: "stays as it was" in server.log)
        assert "tls_key" in server.log
        assert serves(server.advertise, newcomer)
        replace_files(fleet.issue("node"), files)
        server.signal(signal.SIGHUP)
        until(lambda: "the certificate was read again" in server.log)
        assert serves(server.advertise, client)


class Unreadable:
    """A file that this process may not read for a time. File modes do not do that, because the tests run as root."""

    def __init__(self, path: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
        read, self.refuses = Path.read_bytes, True

        def read_bytes(at: Path) -> bytes:
            if at == path and self.refuses:
                raise PermissionError(13, "Permission denied")
            return read(at)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)


async def test_server_uses_a_file_as_soon_as_it_is_readable(
    fleet: Authority, files: TlsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`cp new.key …; chown kvferry …`: the second step changes neither the time nor the size of the file."""
    monkeypatch.setattr("kvferry_server.node.certificates.CERTIFICATE_POLL", 0.01)
    certificates, newer = Certificates(files), fleet.issue("newer")
    following = asyncio.create_task(certificates.run())
    try:
        key = Unreadable(files.key, monkeypatch)
        replace_files(newer, files)
        await asyncio.to_thread(until, lambda: "Permission denied" in caplog.text)
        key.refuses = False
        await asyncio.to_thread(until, lambda: certificates.content() == read_tls(newer))
    finally:
        following.cancel()
    assert caplog.text.count("stays as it was") == 1


def test_client_uses_a_file_as_soon_as_it_is_readable(
    fleet: Authority, files: TlsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    followed, newer = TlsFiles(files), fleet.issue("newer")
    old = followed.content()
    key = Unreadable(files.key, monkeypatch)
    replace_files(newer, files)
    for _ in range(3):
        followed.look_soon()
        assert followed.content() is old
    key.refuses = False
    followed.look_soon()
    assert followed.content() == read_tls(newer)
    assert caplog.text.count("cannot be used") == 1


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"listen": "0.0.0.0:0"}, "listen"),
        ({"listen": "0.0.0.0:0", "insecure": True}, "advertise"),
    ],
)
def test_addresses_that_hosts_could_not_use_or_should_not_are_refused(flags: dict[str, Any], setting: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load(flags, None)
    assert caught.value.values["setting"] == setting


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_ca"])
def test_a_name_that_no_file_can_have_is_refused_by_its_setting(files: TlsConfig, setting: str) -> None:
    named = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca, setting: "a\0b"}
    (problem,) = file_problems(load(named, None))
    assert problem.startswith(f"{setting} is 'a\\x00b' ")


@pytest.mark.parametrize(("setting", "address"), [("unix", "/a\0b"), ("listen", "a\0b:1"), ("admin", "a\0b:1")])
def test_an_address_that_none_can_be_is_refused_by_its_setting(setting: str, address: str) -> None:
    with pytest.raises(BadConfig) as refused:
        load({setting: address}, None)
    assert refused.value.values["setting"] == setting


def test_check_config_opens_every_file_and_names_the_setting_of_each_wrong_file(
    fleet: Authority, files: TlsConfig, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[[rule]]\nidentities = ['**']\nobserver = true\n")
    flags = ["--check-config", *tls_flags(files), "--policy", str(policy)]
    good = refused(*flags)
    assert (good.returncode, good.stderr) == (0, "")

    def said() -> list[str]:
        bad = refused(*flags)
        assert bad.returncode == 2
        assert "tls_cert = " in bad.stdout
        return bad.stderr.splitlines()

    policy.write_text("[[rule]]\nidentity = ['**']\n")
    assert files.key is not None
    assert files.ca is not None
    files.key.write_bytes((fleet.folder / "fleet.key").read_bytes())
    key, rules = said()
    authority = files.ca.read_bytes()
    files.ca.unlink()
    ca, rules = said()
    assert (
        ca == f"kvferryd: tls_ca is '{files.ca}' (from --tls-ca): expected a readable file (No such file or directory)"
    )
    assert "tls_key is" in key
    assert f"(from --tls-key): expected the private key of the certificate in {files.cert}" in key
    assert "policy is" in rules
    assert "(from --policy)" in rules
    policy.write_text("[[rule]]\nidentities = ['**']\n")
    files.ca.write_bytes(authority)
    replace_files(fleet.issue("expired", days=-1), files)
    (expired,) = said()
    assert "tls_cert is" in expired
    assert "valid now" in expired


def test_key_of_another_certificate_is_refused_at_the_start(fleet: Authority) -> None:
    node, other = fleet.issue("node"), fleet.issue("other")
    wrong = TlsConfig(ca=node.ca, cert=node.cert, key=other.key)
    with pytest.raises(InvalidField, match=r"tls_key.*the private key of the certificate in"):
        read_tls(wrong)
    started = refused("--listen", "127.0.0.1:0", "--unix", "", *tls_flags(wrong))
    assert started.returncode == 2
    assert "tls_key" in started.stderr
