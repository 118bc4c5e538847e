"""The server to attack, and the numbers of examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.target import Target
from tests.support.examples import SAME, examples

EXAMPLES = examples(16)
"""Random messages per method and kind."""

FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize=SAME,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
