"""Where these tests can run: those of `verbs` where there is a card, those of `hosts` under ``make test-rdma``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICES = Path("/sys/class/infiniband")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = {item for item in items if item.path.is_relative_to(HERE)}
    for item in here:
        if item.path.is_relative_to(HERE / "verbs"):
            if not DEVICES.is_dir() or not any(DEVICES.iterdir()):
                item.add_marker(pytest.mark.skip("there is no RDMA device: run make test-rdma"))
        elif item.path.is_relative_to(HERE / "hosts") and not os.environ.get("KVFERRY_RDMA_MACHINES"):
            item.add_marker(pytest.mark.skip("machines with RDMA are started by make test-rdma"))
