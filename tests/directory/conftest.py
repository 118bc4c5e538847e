"""One real etcd for the tests of a module, restarted if a test has ended it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry import Directory, open_directory
from kvferry.errors import DirectoryUnavailable
from tests.support.etcd import Etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def problem(directory: Directory) -> str:
    """The problem of a directory that has not answered yet."""
    with pytest.raises(DirectoryUnavailable) as caught:
        directory.listed()
    return str(caught.value.values["problem"])


@pytest.fixture
def opened() -> Iterator[Callable[[str], Directory]]:
    """Opens directories, and closes them in the end."""
    with ExitStack() as stack:

        def make(url: str) -> Directory:
            made = open_directory(url)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "directory.toml"
