"""Node servers in processes of their own, and engines on them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.caches import POISON, Model, shards
from tests.support.engines import Engine, engines_in, two_homes
from tests.support.repository import ROOT

MODULES = ROOT / "tests" / "support" / "nodejs" / "node_modules"


@pytest.fixture(autouse=True)
def late_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is short of processors may take more than the second after which a read ends unconfirmed."""
    monkeypatch.setattr("kvferry._control.lease_holder.VERDICT_TIMEOUT", 30.0)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's on TCP, the destination's on a UNIX socket."""
    with two_homes(tmp_path_factory.mktemp("homes")) as addresses:
        yield addresses


@pytest.fixture(params=["", "tcp"], ids=["ucx-default", "ucx-tcp"])
def ucx_tls(request: pytest.FixtureRequest) -> str:
    """UCX's default moves bytes inside the post; over tcp a post really returns before it is done."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared(homes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """A source and a destination of one rank each, for tests that do nothing lasting to them."""
    folder, model = tmp_path_factory.mktemp("shared"), Model()
    made = [Engine(homes[0], model, shards(model.heads, 1), folder)]
    try:
        made.append(Engine(homes[1], model, shards(model.heads, 1), folder, serve=False))
        yield made[0].ready(), made[1].ready()
    finally:
        for each in made:
            each.close()


@pytest.fixture
def one_to_one(shared: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """The shared engines, the destination's memory poisoned."""
    shared[1].memories[0].cells[:] = POISON
    return shared


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made."""
    with engines_in(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the TypeScript examples, compiled. It is where it would be in a checkout."""
    if not MODULES.exists():
        pytest.skip("tests/support/nodejs is not installed: npm was missing at set-up")
    root = tmp_path_factory.mktemp("checkout")
    (root / "protos").symlink_to(ROOT / "protos")
    folder = root / "examples" / "router"
    folder.mkdir(parents=True)
    for pattern in ("*.ts", "*.json"):
        for file in (ROOT / "examples" / "router").glob(pattern):
            shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(MODULES)
    done = subprocess.run([MODULES / ".bin" / "tsc"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return folder
