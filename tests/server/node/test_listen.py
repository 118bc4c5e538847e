"""The addresses of a server, and the checks before it listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvferry._wire.channel import Address, connect, parse_address
from kvferry.errors import InvalidField
from kvferry_server.node.config import NodeConfig, advertised
from kvferry_server.node.main import run
from tests.support.node_servers import Kvferryd, refused, serves


def test_addresses_of_both_kinds_serve_and_the_start_line_has_the_real_port(tmp_path: Path) -> None:
    with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "127.0.0.1:0") as server:
        assert len(server.addresses) == 2
        assert server.address == f"unix:{tmp_path}/node.sock"
        assert parse_address(server.addresses[1]).port > 0
        assert server.advertise == server.addresses[1]
        assert all(serves(address) for address in server.addresses)


def test_reflection_lists_all_services_and_their_files(tmp_path: Path) -> None:
    with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "") as server, connect(server.address) as channel:
        database: Any = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "kvferry.v1.KVTransfer",
            "kvferry.v1.Introspection",
            "kvferry.v1.Admin",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        found = DescriptorPool(database).FindServiceByName("kvferry.v1.KVTransfer")
        assert {"RegisterCache", "Handshake", "ReadBlocks", "ReadChecksums", "Notify", "Watch"} == set(
            found.methods_by_name
        )


def test_second_server_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0") as first:
        again = refused("--unix", str(path), "--listen", "")
        assert again.returncode == 1
        assert "another node server has it" in again.stderr
        assert "Traceback" not in again.stderr
        port = refused("--unix", "", "--listen", first.addresses[1])
        assert port.returncode == 1
        assert "in use" in port.stderr
        assert path.exists()
        assert all(serves(address) for address in first.addresses)
    assert list(tmp_path.iterdir()) == []


def test_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "") as killed:
        killed.kill()
        assert {left.name for left in tmp_path.iterdir()} == {"node.sock", "node.sock.lock"}
        with Kvferryd("--unix", str(path), "--listen", "") as server:
            assert serves(server.address)
            assert "replacing" in server.log
            assert server.epoch != killed.epoch
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_socket_stays_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("important")
    answer = refused("--unix", str(path), "--listen", "")
    assert answer.returncode == 1
    assert "not a socket" in answer.stderr
    assert path.read_text() == "important"
    assert list(tmp_path.iterdir()) == [path]


def test_lock_that_is_a_strangers_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("important")
    lock = tmp_path / "node.sock.lock"
    lock.symlink_to(precious)
    answer = refused("--unix", str(tmp_path / "node.sock"), "--listen", "")
    assert answer.returncode == 1
    assert "node.sock.lock" in answer.stderr
    lock.unlink()
    lays: list[Callable[[], None]] = [lambda: lock.hardlink_to(precious), lambda: os.mkfifo(lock)]
    for lay in lays:
        lay()
        with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "") as server:
            assert serves(server.address)
        assert not lock.exists()
    assert precious.read_text() == "important"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users")
def test_files_of_a_stranger_in_a_shared_directory_are_refused(tmp_path: Path) -> None:
    everybody = tmp_path / "tmp"
    everybody.mkdir()
    everybody.chmod(0o1777)
    strangers = everybody / "strangers"
    strangers.mkdir()
    os.chown(strangers, 65534, 65534)
    link = everybody / "link"
    link.symlink_to(tmp_path)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    lock = everybody / "taken.sock.lock"
    lock.touch()
    os.chown(lock, 65534, 65534)
    for path in (strangers / "node.sock", link / "node.sock", everybody / "taken.sock"):
        answer = refused("--unix", str(path), "--listen", "")
        assert answer.returncode == 1
        assert "another user's" in answer.stderr
    with Kvferryd("--unix", str(everybody / "ours" / "node.sock"), "--listen", "") as server:
        assert serves(server.address)
    everybody.chmod(0o777)
    answer = refused("--unix", str(everybody / "ours" / "node.sock"), "--listen", "")
    assert "everybody may exchange files" in answer.stderr


@pytest.mark.parametrize("directory", [0o700, 0o750, 0o755])
def test_socket_admits_users_who_may_enter_its_directory(tmp_path: Path, directory: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(directory)
    with Kvferryd("--unix", str(folder / "node.sock"), "--listen", "") as server:
        assert (folder / "node.sock").stat().st_mode & 0o777 == 0o666
        assert ("every user" in server.log) is (directory == 0o755)


def test_missing_directory_is_created_for_this_user_only(tmp_path: Path) -> None:
    with Kvferryd("--unix", str(tmp_path / "run" / "node.sock"), "--listen", ""):
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "[::]:0"], "--insecure"),
        (["--listen", "192.0.2.1:0"], "--insecure"),
        (["--listen", "0.0.0.0:0", "--insecure"], "advertise"),
        (["--listen", "unix:/tmp/x"], "listen"),
        (["--listen", "nowhere"], "listen"),
        (["--listen", "", "--unix", ""], "listen"),
        (["--unix", "/" + "x" * 200], "107 bytes"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "/nowhere"),
        (["--listen", "127.0.0.1:0", "--tls-ca", "/nowhere"], "tls_cert"),
        (["--listen", "0.0.0.0:0", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "--anonymous-tls"),
        (["--listen", "0.0.0.0:0", "--anonymous-tls"], "--insecure"),
    ],
)
def test_settings_that_cannot_work_are_named(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NodeConfig.model_fields:
        monkeypatch.delenv(f"KVFERRYD_{name.upper()}", raising=False)
    monkeypatch.setattr("gc.freeze", lambda: None)  # Otherwise no later test here could collect what is here now.
    unix = [] if "--unix" in arguments else ["--unix", ""]
    assert run([*arguments, *unix]) == 2
    told = capfd.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_listening_off_loopback_works_if_the_settings_allow_it() -> None:
    with Kvferryd("--listen", "0.0.0.0:0", "--insecure", "--advertise", "127.0.0.1", "--unix", "") as server:
        assert serves(server.advertise)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("", "127.0.0.1:99"),
        ("node7", "node7:99"),
        ("node7:0", "node7:99"),
        ("node7:12", "node7:12"),
        ("[fd00::7]", "[fd00::7]:99"),
        ("[fd00::7]:12", "[fd00::7]:12"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_advertised_address_is_derived_from_the_settings(wanted: str, expected: str) -> None:
    assert advertised(wanted, Address(host="127.0.0.1", port=99), None) == expected


@pytest.mark.parametrize("wanted", ["fd00::7", "node7:x", "node7:70000", "http://node7:1", ":5"])
def test_advertised_address_that_no_host_could_use_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidField):
        advertised(wanted, Address(host="127.0.0.1", port=99), None)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "::1:5", "http://h:1", "dns:h:1", "unix:relative", "h:-1", "h:٣"]
)
def test_address_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(InvalidField):
        parse_address(text)


def test_address_survives_formatting_and_parsing() -> None:
    for text in ("unix:/run/x.sock", "host:1", "127.0.0.1:0", "[::1]:65535"):
        assert str(parse_address(text)) == text
    assert str(parse_address("unix:///run/x.sock")) == "unix:/run/x.sock"


def test_http_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with Kvferryd("--unix", "", "--listen", "127.0.0.1:0") as server, socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert serves(server.address)


def test_missing_server_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(grpc.RpcError) as caught:
        serves(f"127.0.0.1:{port}")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
