"""Most of these tests need SGLang, which is in an environment of its own: `make test-sglang`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import make_model

WITHOUT_SGLANG = {"test_aux_rows.py", "test_bootstrap.py", "test_sglang_settings.py", "test_support.py"}
"""The others start instances of it, or import it."""

collect_ignore = (
    [] if find_spec("sglang") else sorted({path.name for path in Path(__file__).parent.glob("test_*")} - WITHOUT_SGLANG)
)


def pytest_report_header(config: pytest.Config) -> str:
    """Say why not all is collected."""
    left_out = "tests/integrations/sglang: instances are left out, SGLang is not installed here (make test-sglang)"
    return "" if find_spec("sglang") else left_out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True, ttl=20, max_ttl=20, hold=20) as server:
        yield server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", kv_heads=2)
