"""A server to fire at, and how much."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.target import Target

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "16"))
"""Random messages per method and kind. `make soak` asks for more."""

FUZZ = settings(
    max_examples=EXAMPLES,
    # The same in every run but a long one.
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
