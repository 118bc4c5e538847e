"""Where the tests of this folder run: on a GPU, or with ``--device cpu`` the same tests on the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

import kvferry
from tests.gpu.device_engines import DeviceEngine, Processes, engines_of
from tests.gpu.transports import transports_of

NO_GPU = "there is no GPU; make test-gpu DEVICE=cpu runs these tests on the host's memory"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the caches, as torch names it."""
    named = str(request.config.getoption("--device"))
    if named == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return "cuda:0" if named == "cuda" else named


@pytest.fixture
def cuda(device: str) -> str:
    """The same, for tests of what only CUDA has."""
    if device == "cpu":
        pytest.skip("there is no GPU to which this could happen")
    return device


@pytest.fixture(scope="session")
def second(device: str) -> str:
    """Another device."""
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("there is no second GPU")
    return "cuda:1" if device != "cpu" else device


@pytest.fixture(scope="session")
def transports(device: str) -> Mapping[str, Mapping[str, str]]:
    """See `transports_of`."""
    return transports_of(device)


@pytest.fixture(scope="session")
def processes(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes that tests share."""
    found = Processes(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def node(processes: Processes) -> Iterator[kvferry.EmbeddedServer]:
    """The node server of all engines."""
    with kvferry.serve(listen="127.0.0.1:0", unix="", drain=1.0) as server:
        yield server


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, node: kvferry.EmbeddedServer, processes: Processes
) -> Iterator[Callable[..., DeviceEngine]]:
    """Make engines, sources before their readers; see `engines_of`. A test that failed leaves no process to others."""
    failed = request.session.testsfailed

    def sound() -> bool:
        return request.session.testsfailed == failed

    with kvferry.Client(node.address) as client, engines_of(client, node.address, processes, sound) as make:
        yield make
