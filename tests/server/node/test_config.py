"""Settings: their sources, which source wins, and the errors of wrong settings."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry_server.domain.times import Times
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.loading import (
    BadConfig,
    add_flags,
    config_file,
    configure,
    load,
    unread_variables,
)
from tests.support.node_servers import Kvferryd, command, environment


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NodeConfig.model_fields:
        monkeypatch.delenv(f"KVFERRYD_{name.upper()}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text('ttl = 4.0\nhold = 40\nfinal = 400\nadvertise = "from-file"\n')
    return path


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRYD_HOLD", "30")
    monkeypatch.setenv("KVFERRYD_FINAL", "300")
    loaded = load({"final": "200"}, file)
    config = loaded.config
    assert (config.final, config.hold, config.ttl, config.engine_ttl) == (200, 30, 4, Times().engine_ttl)
    assert {name: loaded.origins[name] for name in ("final", "hold", "ttl", "engine_ttl")} == {
        "final": "--final",
        "hold": "KVFERRYD_HOLD",
        "ttl": str(file),
        "engine_ttl": "default",
    }


def test_environment_variables_may_have_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("kvferryd_Hold", "30")
    loaded = load({})
    assert (loaded.config.hold, loaded.origins["hold"]) == (30, "KVFERRYD_HOLD")


def test_environment_variables_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SERVER", "unix:/run/kvferry/node.sock")
    assert load({}).config == configure()


def test_configure_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRYD_TTL", "7")
    assert configure(unix="").ttl == Times().ttl


def test_durations_of_a_home_are_settings_with_the_same_defaults() -> None:
    assert configure().times == Times()
    changed = {field.name: getattr(Times(), field.name) - 0.5 for field in fields(Times)}
    assert configure(**changed).times == Times(**changed)


def test_settings_have_a_flag_with_help_and_a_name_in_the_environment() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for name, field in NodeConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert f"KVFERRYD_{name.upper()}" in text
        assert field.description
    for flag in ("--listen HOST:PORT", "--tls-cert FILE", "--ttl SECONDS", "--max-calls N", "--memory SIZE"):
        assert flag in text
    assert "--no-insecure" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ttl": "soon"}, ["ttl is 'soon' (from --ttl)", "number"]),
        ({"ttl": "0"}, ["ttl is '0' (from --ttl)", "positive"]),
        ({"ttl": "nan"}, ["ttl is 'nan' (from --ttl)", "positive"]),
        ({"ttl": "31"}, ["ttl is '31' (from --ttl)", "max_ttl"]),
        ({"max_calls": "0"}, ["max_calls is '0' (from --max-calls)"]),
        ({"log_level": "loud"}, ["log_level is 'loud' (from --log-level)", "'info'"]),
        ({"listen": "here"}, ["listen is 'here' (from --listen)", "host:port"]),
        ({"tls_key": "x"}, ["tls_cert is None (from default)", "tls_key"]),
        ({"drain": "-1", "max_streams": "x"}, ["drain is '-1'", "max_streams is 'x'"]),
    ],
)
def test_error_names_the_setting_its_value_and_origin(flags: dict[str, str], says: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load(flags)
    assert all(part in str(caught.value) for part in says)


def test_error_names_the_variable_or_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRYD_RETIRE", "never")
    with pytest.raises(BadConfig, match=r"retire is 'never' \(from KVFERRYD_RETIRE\)"):
        load({}, file)
    monkeypatch.delenv("KVFERRYD_RETIRE")
    file.write_text("hodl = 3\n")
    with pytest.raises(BadConfig) as caught:
        load({}, file)
    assert f"hodl is 3 (from {file}): no such setting; did you mean hold?" in str(caught.value)


def test_a_key_in_place_of_its_files_name_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    monkeypatch.setenv("KVFERRYD_TLS_CERT", "/c.pem")
    monkeypatch.setenv("KVFERRYD_TLS_KEY", text)
    with pytest.raises(BadConfig, match=r"tls_key.*not what is in it") as caught:
        load({})
    assert "c2VjcmV0" not in f"{caught.value} {caught.value.values}"


@pytest.mark.parametrize("content", ["ttl =", "\x00", None])
def test_unreadable_config_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadConfig, match=str(path)):
        load({}, path)


def test_config_file_can_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRYD_CONFIG", "/etc/kvferry.toml")
    assert config_file(None) == Path("/etc/kvferry.toml")
    assert config_file("other.toml") == Path("other.toml")
    monkeypatch.delenv("KVFERRYD_CONFIG")
    assert config_file(None) is None


def test_effective_configuration_can_be_used_as_a_config_file(file: Path, tmp_path: Path) -> None:
    loaded = load({"unix": "/tmp/x.sock", "insecure": True}, file)
    again = tmp_path / "again.toml"
    again.write_text(loaded.describe())
    assert load({}, again).config == loaded.config
    assert f"# {file}" in loaded.describe()
    assert "# --insecure" in loaded.describe()


def test_check_config_prints_the_configuration_and_starts_nothing(file: Path) -> None:
    done = subprocess.run(
        command("--check-config", "--config", str(file), "--no-insecure"),
        capture_output=True,
        text=True,
        env=environment(KVFERRYD_HOLD="41"),
        check=True,
    )
    assert "hold = 41.0" in done.stdout
    assert "# KVFERRYD_HOLD" in done.stdout
    assert done.stderr == ""


def test_wrong_flags_end_with_usage() -> None:
    done = subprocess.run(command("--lisen", "x"), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 2
    assert "--lisen" in done.stderr


def test_server_without_its_extra_names_the_extra_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvferry_server.node.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert "pip install 'kvferry[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_variable_that_is_not_read_is_reported_with_the_one_that_was_meant() -> None:
    settings = {f"KVFERRYD_{name.upper()}" for name in NodeConfig.model_fields}
    known = dict.fromkeys((*settings, "KVFERRYD_CONFIG", "KVFERRY_SERVER", "kvferryd_listen", "PATH"), "x")
    services = {
        "KVFERRYD_SERVICE_HOST": "10.96.0.9",
        "KVFERRYD_SERVICE_PORT_GRPC": "7423",
        "KVFERRYD_PORT": "tcp://10.96.0.9:7423",
        "KVFERRYD_NODE_PORT_7423_TCP_ADDR": "10.96.0.9",
    }
    assert unread_variables({**known, **services}) == []
    # Both have settings of these names.
    assert unread_variables({**known, "KVFERRY_TLS_CERT": "x", "KVFERRY_DIRECTORY": "x"}) == []
    wrong = {"KVFERRYD_LISTN": "x", "KVFERRYD_ADMIN_PORT": "1", "KVFERRY_POLICY": "x", "KVFERRY_TLS_CERT": "x"}
    assert unread_variables(wrong) == [
        "nothing reads the variable KVFERRYD_ADMIN_PORT; did you mean KVFERRYD_ADMIN?",
        "nothing reads the variable KVFERRYD_LISTN; did you mean KVFERRYD_LISTEN?",
        "kvferryd does not read KVFERRY_POLICY; the name of its variable is KVFERRYD_POLICY",
        "kvferryd does not read KVFERRY_TLS_CERT; the name of its variable is KVFERRYD_TLS_CERT",
    ]
    misspelt = {"KVFERRYD_ADVERTIZE": "10.0.0.1"}
    with Kvferryd("--unix", "", "--listen", "127.0.0.1:0", env=misspelt) as server:
        assert "WARNING kvferryd: nothing reads the variable KVFERRYD_ADVERTIZE; did you mean KVFERRYD_ADVERTISE?" in (
            server.log
        )


def test_certificate_of_clients_in_the_environment_is_not_the_servers() -> None:
    settings = environment(KVFERRY_TLS_CERT="/c.pem", KVFERRY_TLS_KEY="/c.key")
    done = subprocess.run(command("--check-config"), env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "kvferryd does not read KVFERRY_TLS_CERT" in done.stderr
    assert "/c.pem" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"hold": 5, "final": 1}, "hold"),
        ({"ttl": 20, "max_ttl": 20, "final": 10}, "ttl"),
        ({"engine_ttl": 60, "retire": 30}, "engine_ttl"),
        ({"ttl": 50}, "ttl"),
    ],
)
def test_durations_that_contradict_each_other_are_refused(settings: dict[str, float], wrong: str) -> None:
    with pytest.raises(BadConfig, match=f"^{wrong} is ") as caught:
        configure(**settings)
    assert caught.value.values["setting"] == wrong


def test_default_duration_may_exceed_a_given_limit() -> None:
    assert configure(final=60).times.hold == Times().hold


def test_log_levels_and_formats_may_have_any_case() -> None:
    config = configure(log_level="INFO", log_format="Json")
    assert (config.log_level, config.log_format) == ("info", "json")
