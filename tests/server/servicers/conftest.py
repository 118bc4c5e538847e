"""A node server within the test's process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.node_in_process import Node, running


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


@pytest_asyncio.fixture
async def ready(node: Node) -> AsyncIterator[Node]:
    """A node whose engine P has its one rank."""
    watch = await node.open_engine()
    await node.register()
    yield node
    watch.cancel()
