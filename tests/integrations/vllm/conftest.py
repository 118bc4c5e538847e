"""These tests need vLLM, which is in an environment of its own: `make test-vllm`. Those in `WITHOUT_VLLM` do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvferry import EngineSpec
from kvferry.testing import Fabric
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry

if TYPE_CHECKING:
    from kvferry.integrations.vllm.scheduler import ConnectorScheduler

# Read by Triton when it is imported, which vLLM does: its kernels then run on host memory.
os.environ.setdefault("TRITON_INTERPRET", "1")

# This application configures kvferry's lines, so they do not go where vLLM's go, but to `caplog`.
logging.getLogger("kvferry").addHandler(logging.NullHandler())

WITHOUT_VLLM = {"test_rest.py"}
collect_ignore = [
    file.name
    for file in Path(__file__).parent.glob("test_*.py")
    if not find_spec("vllm") and file.name not in WITHOUT_VLLM
]

if find_spec("vllm"):
    # Before anything imports vLLM: tests/integrations/vllm/layouts runs its Triton kernels.
    import tests.integrations.vllm.layouts.interpreter  # noqa: F401


def pytest_report_header(config: pytest.Config) -> str:
    """Say why little is collected."""
    return "" if find_spec("vllm") else "tests/integrations/vllm: few, as vLLM is not installed here (make test-vllm)"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True, ttl=6, max_ttl=6, hold=20) as server:
        yield server


@pytest.fixture
def pair(home: NodeServerProcess, tmp_path: Path) -> Iterator[Callable[..., tuple[Node, Node]]]:
    """Start a prefill and a decode engine of a model, each with settings of its own; both fail what cannot be read."""
    nodes: list[Node] = []

    def make(model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Node, Node]:
        for role, settings in (("kv_producer", prefill), ("kv_consumer", decode)):
            connector = kvferry(role, home.address, kv_load_failure_policy="fail")
            nodes.append(Node(model, tmp_path / f"{role}.log", connector=connector, **settings))
        return nodes[-2].ready(), nodes[-1].ready()

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


@pytest.fixture
def decode(fabric: Fabric) -> Iterator[Callable[..., ConnectorScheduler]]:
    """Make the connector's schedulers of decode engines, whose steps a test plays."""
    from tests.integrations.vllm.played_reader import scheduler_of
    from tests.integrations.vllm.played_setup import GROUP, setup_of

    made: list[ConnectorScheduler] = []

    def make(engine_id: str = "decode", **options: Any) -> ConnectorScheduler:
        setup = setup_of(fabric, EngineSpec(engine_id, (GROUP,)), serves=False, caches_prefixes=True, **options)
        made.append(scheduler_of(setup))
        # The workers are not played.
        made[-1]._registered = {0}
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
