"""A directory in a file: read again when it is edited, and kept when the edit is wrong."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry import Directory, Listed
from kvferry.errors import Closed, DirectoryUnavailable, EngineNotListed
from tests.directory.conftest import problem
from tests.support.waiting import until

Open = Callable[[str], Directory]

GOOD = """
homes = ["10.0.0.1:7423"]

[engines.prefill-0]
home = "10.0.0.2:7423"
labels = { role = "prefill" }
"""


def replace(file: Path, content: str) -> None:
    """Replace the file atomically, like an editor or a ConfigMap."""
    fresh = file.with_suffix(".new")
    fresh.write_text(content)
    os.replace(fresh, file)  # noqa: PTH105


def test_toml_and_json_have_the_same_content(opened: Open, file: Path, tmp_path: Path) -> None:
    file.write_text(GOOD)
    json = tmp_path / "directory.json"
    json.write_text(
        '{"homes": ["10.0.0.1:7423"],'
        ' "engines": {"prefill-0": {"home": "10.0.0.2:7423", "labels": {"role": "prefill"}}}}'
    )
    directory, other = opened(f"file:{file}"), opened(f"file:{json}")
    assert directory.wait(30)
    assert other.wait(30)
    assert directory.listed() == other.listed()
    assert directory.listed().homes == {"10.0.0.1:7423", "10.0.0.2:7423"}
    found = directory.resolve("prefill-0", b"i" * 16)
    assert (found.home, found.labels) == ("10.0.0.2:7423", {"role": "prefill"})
    with pytest.raises(EngineNotListed) as caught:
        directory.resolve("decode-0")
    assert caught.value.values["engine_id"] == "decode-0"


def test_edits_of_the_file_are_read_and_wrong_ones_are_logged_once(
    opened: Open, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(GOOD)
    directory = opened(f"file:{file}")
    told: list[Listed] = []
    end = directory.watch(told.append)
    until(lambda: len(told) == 1)
    with caplog.at_level(logging.INFO):
        replace(file, "homes = [")
        until(lambda: "cannot be read" in caplog.text)
        # The directory keeps its last content, and later attempts log nothing.
        assert directory.resolve("prefill-0").home == "10.0.0.2:7423"
        replace(file, 'homes = ["unix:/run/kvferry/node.sock"]')
        replace(file, GOOD.replace("10.0.0.2", "10.0.0.3"))
        # The last step of reading: before it, the directory answers and logs that it does.
        until(lambda: len(told) == 2)
    assert caplog.text.count("cannot be read") == 1
    assert "answers again" in caplog.text
    assert directory.resolve("prefill-0").home == "10.0.0.3:7423"
    assert [listed.find("prefill-0") for listed in told][-1] == directory.resolve("prefill-0")
    assert len(told) == 2
    end()


def test_lookups_do_not_wait_for_a_watch_and_a_watch_may_look_up(opened: Open, file: Path) -> None:
    file.write_text(GOOD)
    directory = opened(f"file:{file}")
    assert directory.wait(30)
    entered, go_on, found = threading.Event(), threading.Event(), list[str]()

    def slow(_: Listed) -> None:
        assert directory.wait(0)
        found.append(directory.resolve("prefill-0").home)
        if len(found) > 1:
            entered.set()
            assert go_on.wait(30)

    directory.watch(slow)
    replace(file, GOOD.replace("10.0.0.2", "10.0.0.3"))
    assert entered.wait(30)
    assert directory.resolve("prefill-0").home == "10.0.0.3:7423"
    go_on.set()
    until(lambda: found == ["10.0.0.2:7423", "10.0.0.3:7423"])


@pytest.mark.parametrize(
    "content",
    ["engines = 3", 'homes = "10.0.0.1:1"', "[engines]\na = 1", "homs = []", '[engines.a]\nhome = "b:1"\nport = 3'],
)
def test_file_that_is_wrong_from_the_start_gets_an_error_with_the_field(opened: Open, file: Path, content: str) -> None:
    file.write_text(content)
    directory = opened(f"file:{file}")
    until(lambda: "expected" in problem(directory))
    assert not directory.wait(0)
    with pytest.raises(DirectoryUnavailable) as caught:
        directory.resolve("a")
    assert caught.value.retryable
    assert caught.value.values["directory"] == f"file:{file}"
    assert "expected" in caught.value.values["problem"]


def test_file_that_is_created_later_is_read(opened: Open, file: Path) -> None:
    directory = opened(f"file:{file}")
    until(lambda: "No such file" in problem(directory))
    assert not directory.wait(0)
    replace(file, GOOD)
    assert directory.wait(30)
    directory.close()
    with pytest.raises(Closed):
        directory.resolve("prefill-0")
