"""The image of deploy/container, built and run."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployed.container import Container, Image
from tests.deployed.debian import read

USER = "10001"


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Container]:
    running = Container(image, tmp_path)
    yield running
    running.program.close()


def test_image_has_what_its_file_says(image: Image) -> None:
    config = image.config
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["kvferryd"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "kvferry", "health"]
    assert list(config["ExposedPorts"]) == ["7423/tcp"]
    made = (image.root / "run/kvferry").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (int(USER), int(USER), 0o750)


def test_container_is_healthy_and_has_no_rights(container: Container, image: Image) -> None:
    check = container.execute(*image.config["Healthcheck"]["Test"][1:], user=USER, group=USER)
    assert (check.returncode, check.stdout) == (0, "SERVING\n"), check.stderr
    status = Path(f"/proc/{container.pid}/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert values["Uid"].split() == values["Gid"].split() == [USER] * 4
    assert {int(values[each], 16) for each in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert values["NoNewPrivs"] == "1"
    written = container.execute("touch", "/opt/kvferry/file", user=USER, group=USER)
    assert "Read-only file system" in written.stderr


def test_container_serves_its_group_alone(container: Container) -> None:
    health = ("kvferry", "health", "--server", "unix:/run/kvferry/node.sock")
    engine = container.execute(*health, user="20001", group=USER)
    assert (engine.returncode, engine.stdout) == (0, "SERVING\n"), engine.stderr
    other = container.execute(*health, user="20001", group="20001")
    assert other.returncode != 0
    assert "ermission denied" in other.stderr


def test_engines_read_through_the_container_and_it_stops_by_its_signal(container: Container, image: Image) -> None:
    assert read(container.run) == "READ all right\n", container.program.said()
    os.kill(container.pid, signal.Signals[image.config["StopSignal"]])
    assert container.program.process.wait(30) == 0, container.program.said()
    assert container.program.said().endswith("stopped\n")
