"""Sources that tests share, and transports that are closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry._clock import now
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.nixl_agent import NixlOptions
from kvferry._transport.transport import Transport
from tests.transport.played_agents import Agents, World
from tests.transport.sources import SOON, Memory, Source

MakeTransport = Callable[..., Transport]
MakeSource = Callable[..., Source]


@pytest.fixture(params=["", "tcp"], ids=["ucx-default", "ucx-tcp"], scope="session")
def ucx_tls(request: pytest.FixtureRequest) -> str:
    """UCX's default copies inside the post; over tcp a post really returns before it is done."""
    return str(request.param)


@pytest.fixture(scope="session")
def source(ucx_tls: str) -> Iterator[Source]:
    """A source that no test harms."""
    with Source(ucx_tls) as made:
        yield made


@pytest.fixture
def new_source() -> Iterator[MakeSource]:
    """Makes sources that a test may kill."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Source(*args, **options))


@pytest.fixture
def memory() -> Memory:
    """Where a test reads to."""
    return Memory(16 << 20)


@pytest.fixture
def transport(memory: Memory) -> Iterator[MakeTransport]:
    """Makes transports into `memory`, whose sources may take their time to answer."""
    made: list[Transport] = []

    def make(ucx_tls: str = "", *, clock: Callable[[], float] = now, **options: Any) -> Transport:
        patient = {"warm_up_timeout": SOON, **options}
        made.append(Transport(RankMemory([memory.region]), NixlOptions(ucx_tls=ucx_tls, **patient), clock=clock))
        return made[-1]

    yield make
    assert [one.close(SOON) for one in made] == [True] * len(made), "a transport did not become quiet"


@pytest.fixture
def world() -> Iterator[World]:
    agents = Agents()
    made = World(agents)
    yield made
    agents.state.clear()
    agents.warm.clear()
    made.later += 1e6
    assert all(transport.close(SOON) for transport in made.transports)
