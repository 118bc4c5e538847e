"""Checks of the container file without a build, because no registry of images is reachable here."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

import kvferry
from tests.support.repository import ROOT

FILE = ROOT / "deploy" / "container" / "Containerfile"
KNOWN = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
SOCKET = "unix:/run/kvferry/node.sock"


def instructions() -> list[tuple[str, str]]:
    """The instructions in order, without comments, with continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def of_last_stage() -> list[tuple[str, str]]:
    found = instructions()
    begin = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[begin + 1 :]


def test_instructions_are_known_and_stages_share_one_python() -> None:
    found = instructions()
    assert {name for name, _ in found} <= KNOWN
    # A virtual environment works only with the interpreter that made it.
    assert [rest.split()[0] for name, rest in found if name == "FROM"] == ["${PYTHON}", "${PYTHON}"]


def test_container_runs_without_privileges_and_without_a_shell() -> None:
    last = of_last_stage()
    (user,) = [rest for name, rest in last if name == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    for name, rest in last:
        if name in ("RUN", "ENTRYPOINT"):
            assert isinstance(json.loads(rest), list)
    assert [name for name, _ in last].index("RUN") < [name for name, _ in last].index("USER")
    (check,) = [rest for name, rest in last if name == "HEALTHCHECK"]
    assert json.loads(check[check.index("CMD") + 3 :]) == ["kvferry", "health", "--server", SOCKET]
    assert ("ENTRYPOINT", '["kvferryd"]') in last


def test_container_installs_the_wheel_of_make_package_by_the_lock() -> None:
    found = instructions()
    assert ("ARG", f"VERSION={kvferry.__version__}") in found
    copied = [rest for name, rest in found if name == "COPY"]
    assert copied[0] == "dist/kvferry-${VERSION}-py3-none-any.whl requirements.lock /build/"
    (install,) = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert "-c /build/requirements.lock" in install
    assert install.endswith('whl[server]"')
    left = (FILE.parent / "Containerfile.dockerignore").read_text().splitlines()
    assert left == ["*", "!dist/*.whl", "!requirements.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_directory_of_the_socket_is_made_as_the_file_specifies(tmp_path: Path) -> None:
    (command,) = [json.loads(rest) for name, rest in of_last_stage() if name == "RUN"]
    made = tmp_path / "kvferry"
    subprocess.run([*command[:-1], str(made)], check=True, timeout=10)
    found = made.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (10001, 0o750)
