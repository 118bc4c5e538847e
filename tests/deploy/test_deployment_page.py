"""The commands of docs/deployment.md, copied into a shell."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tomllib

from kvferry_server.node.loading import load, read_policy
from kvferry_server.servicers.access import Need, PolicyRole
from tests.support.node_servers import environment, free_port
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "deployment.md").read_text()
SECTION = PAGE[PAGE.index("## Two nodes") : PAGE.index("## systemd")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_commands_of_the_page_start_two_nodes(tmp_path: Path) -> None:
    commands = [text for kind, text in BLOCK.findall(SECTION) if kind == "sh"]
    assert len(commands) == 8
    install, *rest = commands
    # Everything is installed already, and the ports may be in use.
    assert install == "pip install '.[server,nixl]'\n"
    script = "set -e\n" + "".join(rest).replace("7423", str(free_port())).replace("7424", str(free_port()))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = Path(sys.executable).parent
    env = environment()
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**env, "PATH": f"{programs}:{env['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = shell.communicate(timeout=100)
    finally:
        # Nothing may be left running after a failure.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
    logs = "".join((tmp_path / node / "log").read_text() for node in ("node-a", "node-b"))
    assert shell.returncode == 0, complained + logs
    quoted = re.findall(r"`([^`]+)`", BLOCK.sub("", SECTION))
    promised = [text for text in quoted if "moved" in text or "released" in text]
    assert len(promised) == 2
    for text in promised:
        assert text in said
    # The operator's two commands.
    assert re.search(r"^\W*prefill\b", said, re.MULTILINE), said
    assert "request-1" in said
    assert 'kvferry_publications{state="published"} 1.0' in said
    assert logs.count("stopped\n") == 2


def test_policy_in_security_fits_the_certificates_of_the_page(tmp_path: Path) -> None:
    names = dict(re.findall(r"^certificate (\S+) URI:(\S+)$", SECTION, re.MULTILINE))
    text = (ROOT / "docs" / "security.md").read_text()
    (tmp_path / "policy.toml").write_text(next(text for kind, text in BLOCK.findall(text) if kind == "toml"))
    policy = read_policy(tmp_path / "policy.toml")

    def allowed(who: str, role: PolicyRole, engine_id: str | None = None) -> bool:
        return policy.granted([names[who]]).allows(Need((role,), engine_id))

    # The names of engines in examples/two_nodes.py.
    assert allowed("prefill", PolicyRole.ENGINE, "prefill-0")
    assert allowed("decode", PolicyRole.ENGINE, "decode-0")
    assert allowed("decode", PolicyRole.READER, "prefill-0")
    assert allowed("operator", PolicyRole.OBSERVER)
    assert allowed("operator", PolicyRole.ADMIN)
    assert not allowed("prefill", PolicyRole.ADMIN)
    assert not allowed("decode", PolicyRole.ENGINE, "prefill-0")


def test_settings_of_the_unit_are_settings() -> None:
    section = PAGE[PAGE.index("## systemd") : PAGE.index("## A container")]
    (toml,) = [text for kind, text in BLOCK.findall(section) if kind == "toml"]
    given = tomllib.loads(toml)
    assert load(given).config.advertise == given["advertise"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_key_with_the_rights_of_the_page_is_read_by_kvferryds_user_and_by_no_other_of_its_group() -> None:
    section = PAGE[PAGE.index("## systemd") : PAGE.index("## A container")]
    (commands,) = [text for kind, text in BLOCK.findall(section) if kind == "sh"]
    assert "chown kvferry /etc/kvferry/node.key" in commands
    kvferry, engine = 4242, 4243

    def reads(key: Path, user: int) -> bool:
        command = ["test", "-r", str(key)]
        return subprocess.run(command, user=user, group=kvferry, extra_groups=[], check=False).returncode == 0

    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        key = Path(folder, "node.key")
        key.touch(0o600)
        os.chown(key, 0, kvferry)
        assert not reads(key, kvferry)
        given = commands.replace("chown kvferry", f"chown {kvferry}").replace("/etc/kvferry/node.key", str(key))
        subprocess.run(["sh", "-e", "-c", given], check=True)
        assert [reads(key, user) for user in (kvferry, engine)] == [True, False]
