"""A fabric for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.testing import Fabric


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made
