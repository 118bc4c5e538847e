"""Calls that are right and come at the wrong time: refused at once as `WrongState`, which says what to do first."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kvferry import Blocks, Client, EngineSpec, Group
from kvferry.engine import Grant, Offer, ReadEnd, SchedulerPort, WorkerPort
from kvferry.errors import WrongState
from tests.api.conftest import AXES, BLOCKS, TOKENS, array
from tests.support.identifiers import unique_id

GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)


class Ports:
    """A scheduler and its worker in one process, and a request whose source offers two blocks."""

    def __init__(self, client: Client) -> None:
        self.client = client
        source = client.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors={"l": array()}, axes=AXES)
        self.session = source.session
        self.publication = source.session.publish("theirs", {"full": Blocks([1, 2])})
        self.scheduler = SchedulerPort(client, EngineSpec(unique_id("reader"), (GROUP,)))
        self.worker = WorkerPort(client, self.scheduler.spec)

    def offered(self) -> Offer:
        self.scheduler.acquire("mine", self.publication.reference)
        while (offer := self.scheduler.granted("mine")) is None:
            pass
        return offer


@pytest.fixture
def ports(client: Client) -> Iterator[Ports]:
    made = Ports(client)
    yield made
    made.scheduler.close()


def test_a_session_of_an_engine_that_another_process_opened(node: str, ports: Ports) -> None:
    with Client(node) as other:
        cache = other.register_cache(
            ports.scheduler.spec, tensors={"l": array()}, axes=AXES, token=str(ports.scheduler.token)
        )
        with pytest.raises(WrongState, match=r"another process opened engine 'reader.*publish there"):
            _ = cache.session


def test_a_worker_port_is_registered_once_and_used_after_it(ports: Ports) -> None:
    with pytest.raises(WrongState, match=r"call WorkerPort\.register first"):
        _ = ports.worker.cache
    ports.worker.register({"l": array()}, axes=AXES)
    with pytest.raises(WrongState, match=r"rank 0 of engine 'reader.* is already registered by this WorkerPort"):
        ports.worker.register({"l": array()}, axes=AXES)


def test_an_offer_is_not_a_grant(ports: Ports) -> None:
    ports.worker.register({"l": array()}, axes=AXES)
    offer = ports.offered()
    assert type(offer) is Offer
    assert offer.blocks()["full"].ids.tolist() == [1, 2]
    with pytest.raises(WrongState, match=re.escape("attach() it first")):
        ports.worker.start(offer)  # type: ignore[arg-type]
    grant = ports.scheduler.attach("mine", {"full": Blocks([3, 4])})
    assert type(grant) is Grant
    assert (grant.read_id, grant.local_blocks()["full"].ids.tolist()) == (offer.read_id, [3, 4])
    ports.worker.start(grant)
    with pytest.raises(WrongState, match="start each grant once"):
        ports.worker.start(grant)
    with pytest.raises(WrongState, match="attach each request once"):
        ports.scheduler.attach("mine", {"full": Blocks([5, 6])})
    ended: list[ReadEnd] = []
    while not ended:
        ports.scheduler.collect(ports.worker.finished())
        ended += ports.scheduler.finished().reads
    assert ended[0].error is None


def test_a_publication_that_is_complete_takes_no_more_blocks(ports: Ports) -> None:
    with pytest.raises(WrongState, match="publication 1 is complete"):
        ports.session.publish_more(ports.publication, {"full": Blocks([3], first_token=2 * TOKENS)}, last=True)
