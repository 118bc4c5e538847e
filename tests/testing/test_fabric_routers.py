"""A router's own reference through the SDK, without sockets: how engines publish under it, read with it, and hear of
every end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, ReleaseOutcome, router_reference
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import (
    BadReference,
    EngineUnknown,
    InvalidField,
    KvferryError,
    LimitReached,
    NotPublished,
    PublicationReleased,
    PublicationTimeout,
    RouterKeyUsed,
    TransferCancelled,
    Unreachable,
    WrongKey,
    WrongState,
)
from kvferry.testing import Fabric
from tests.testing.fabric_engines import AXES, HEADS, SOON, Engine, kv

VALUES = kv(tokens=8)
THEIRS, MINE = [3, 1], [5, 6]
Pair = tuple[Engine, Engine]


@pytest.fixture
def pair(fabric: Fabric) -> Pair:
    return Engine(fabric, "p"), Engine(fabric, "d")


def made(fabric: Fabric, engine_id: str = "p", **options: object) -> str:
    """A reference as a router makes it."""
    return router_reference(fabric.address, engine_id, **options)  # type: ignore[arg-type]


def publish(source: Engine, reference: str, request_id: str = "request") -> None:
    source.write(VALUES, THEIRS)
    source.session.publish(request_id, {"full": Blocks(THEIRS, end_token=8)}, reference=reference)


def outcome(source: Engine) -> ReleaseOutcome:
    """How the next publication to be released ended."""
    (release,) = source.session.released(SOON)
    return release.outcome


def test_a_reader_that_asks_first_gets_the_blocks(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p", 2), Engine(fabric, "d", 3)
    reference = made(fabric)
    reads = decode.read(reference, MINE)
    fabric.wait_until_waiting(3)
    publish(prefill, reference, "named by its source")
    assert {read.result(SOON).request_id for read in reads} == {"named by its source"}
    assert decode.holds(VALUES, MINE)
    assert outcome(prefill) is ReleaseOutcome.READ


def test_a_reader_may_wait_for_longer_than_a_lease_lasts() -> None:
    """Its lease begins when the publication comes."""
    with Fabric(ttl=10.0, max_ttl=10.0) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        reference = made(fabric)
        (read,) = decode.read(reference, MINE)
        fabric.wait_until_waiting()
        fabric.advance(12.5)
        publish(prefill, reference)
        assert read.result(SOON).confirmed
        assert decode.holds(VALUES, MINE)


def test_a_reader_that_comes_later_gets_the_blocks_too(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    reference = made(fabric)
    publish(prefill, reference)
    (read,) = decode.read(reference, MINE)
    assert read.result(SOON).bytes == VALUES.nbytes
    assert decode.holds(VALUES, MINE)


def test_a_reader_without_the_key_gets_nothing(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    reference = made(fabric)
    forged = parse_reference(reference)
    forged.key = b"0" * 16
    (wrong,) = decode.read(format_reference(forged), MINE)
    fabric.wait_until_waiting()
    publish(prefill, reference)
    assert isinstance(wrong.exception(SOON), WrongKey)


def test_a_router_that_gives_up_ends_source_and_reader(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    reference = made(fabric)
    (read,) = decode.read(reference, MINE)
    fabric.wait_until_waiting()
    fabric.client().decline(reference)
    error = read.exception(SOON)
    assert isinstance(error, PublicationReleased)
    assert error.values["outcome"] == "DECLINED"
    publish(prefill, reference)
    assert outcome(prefill) is ReleaseOutcome.DECLINED


def test_a_wait_is_as_long_as_asked(fabric: Fabric, pair: Pair) -> None:
    (read,) = pair[1].read(made(fabric), MINE, timeout=0.3)
    error = read.exception(SOON)
    # The home answers a little before the read's own deadline; on a busy machine, after it.
    assert isinstance(error, (PublicationTimeout, Unreachable))
    if isinstance(error, PublicationTimeout):
        assert "router key" in str(error) or "as '" in str(error)
    fabric.wait_until_waiting(0)


def test_a_read_that_is_cancelled_waits_no_more(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    reference = made(fabric)
    (read,) = decode.read(reference, MINE)
    fabric.wait_until_waiting()
    read.cancel()
    assert isinstance(read.exception(SOON), TransferCancelled)
    fabric.wait_until_waiting(0)
    # The publication was not declined, so another reader may have it.
    publish(prefill, reference)
    (other,) = decode.read(reference, MINE)
    assert other.result(SOON).bytes == VALUES.nbytes


def test_a_retry_at_another_source_has_another_reference(fabric: Fabric) -> None:
    first, second, decode = Engine(fabric, "p1"), Engine(fabric, "p2"), Engine(fabric, "d")
    refused, reference = made(fabric, "p1"), made(fabric, "p2")
    (read,) = decode.read(refused, MINE)
    fabric.wait_until_waiting()
    # The first source refuses the request: it says so itself, at its own home.
    first.scheduler.decline(refused)
    assert isinstance(read.exception(SOON), PublicationReleased)
    (read,) = decode.read(reference, MINE)
    publish(second, reference)
    assert read.result(SOON).bytes == VALUES.nbytes


def test_a_home_that_restarts_finds_readers_and_sources_again(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    waited, held = made(fabric), made(fabric)
    (read,) = decode.read(waited, MINE)
    fabric.wait_until_waiting()
    publish(prefill, held)
    fabric.stop_home()
    fabric.start_home()
    fabric.wait_until_waiting()
    # What was published before the restart is found by the router's key as well.
    (other,) = decode.read(held, [7, 8])
    assert other.result(SOON).bytes == VALUES.nbytes
    prefill.session.publish("late", {"full": Blocks([2], end_token=4)}, reference=waited)
    assert read.result(SOON).bytes == VALUES.nbytes // 2


def test_a_source_that_dies_ends_the_wait_before_its_time() -> None:
    with Fabric(engine_ttl=0.3) as fabric:
        prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
        (read,) = decode.read(made(fabric), MINE, timeout=60)
        fabric.wait_until_waiting()
        fabric.kill(prefill.scheduler)
        assert isinstance(read.exception(SOON), EngineUnknown)


def test_a_key_is_used_once(fabric: Fabric, pair: Pair) -> None:
    prefill, decode = pair
    reference = made(fabric)
    publish(prefill, reference)
    with pytest.raises(RouterKeyUsed) as at_once:
        publish(prefill, reference, "again")
    assert at_once.value.values["publication"] == "1"
    # The blocks are not pinned by what was refused.
    assert [held.number for held in prefill.session.unreleased()] == [1]
    (read,) = decode.read(reference, MINE)
    read.result(SOON)
    assert outcome(prefill) is ReleaseOutcome.READ
    # The home remembers it for longer than the source does.
    with pytest.raises(RouterKeyUsed):
        publish(prefill, reference, "again")
    assert outcome(prefill) is ReleaseOutcome.ABORTED
    assert prefill.session.unreleased() == ()


def test_references_that_cannot_be_published_under(fabric: Fabric, pair: Pair) -> None:
    prefill, _ = pair
    own = prefill.publish(VALUES, THEIRS).reference
    for reference in (own, made(fabric, "another"), made(fabric, "p", data_parallel_rank=1)):
        with pytest.raises(InvalidField) as caught:
            publish(prefill, reference)
        assert caught.value.values["field"] == "reference"
        assert reference not in str(caught.value)
    with pytest.raises(BadReference):
        publish(prefill, "kvf1.nonsense")


@pytest.mark.parametrize("rank", [0, 3])
def test_data_parallel_engines_publish_under_the_deployments_name(fabric: Fabric, rank: int) -> None:
    prefill, decode = Engine(fabric, f"p_dp{rank}"), Engine(fabric, "d")
    reference = made(fabric, "p", data_parallel_rank=rank)
    (read,) = decode.read(reference, MINE)
    fabric.wait_until_waiting()
    publish(prefill, reference)
    assert read.result(SOON).bytes == VALUES.nbytes


class Ports:
    """A source and a destination on the engine ports."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.source, _ = self._port("p")
        self.scheduler, self.worker = self._port("d")

    def _port(self, name: str) -> tuple[SchedulerPort, WorkerPort]:
        client = self.fabric.client()
        port = SchedulerPort(client, EngineSpec(name, (Group("full", block_tokens=4, num_blocks=32),)))
        worker = WorkerPort(self.fabric.client(), port.spec, 0, token=str(port.token))
        memory = {"layer0": np.zeros((2, 32, 6, 4, 8), np.uint16)}
        worker.register(memory, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS)
        return port, worker

    def publish(self, reference: str) -> None:
        self.source.publish("prefill-1", {"full": Blocks(THEIRS, end_token=8)}, reference=reference)

    def outcome(self) -> ReleaseOutcome:
        """How the only publication ended."""
        while not (released := self.source.released()):
            self.scheduler.wait_news(0.01)
        return released[0].outcome

    def refusal(self, request_id: str) -> PublicationReleased | NotPublished:
        """The error with which a request that waits is not granted."""
        while True:
            try:
                assert self.scheduler.granted(request_id) is None
            except (NotPublished, PublicationReleased) as error:
                return error
            self.scheduler.wait_news(SOON)


@pytest.fixture
def ports(fabric: Fabric) -> Iterator[Ports]:
    made = Ports(fabric)
    yield made
    made.scheduler.close()
    made.source.close()


def test_ports_are_offered_the_publications_own_reference(fabric: Fabric, ports: Ports) -> None:
    reference = made(fabric)
    ports.scheduler.acquire("decode-1", reference)
    fabric.wait_until_waiting()
    ports.publish(reference)
    assert ports.scheduler.wait_news(SOON)
    offer = ports.scheduler.granted("decode-1")
    assert offer is not None
    assert parse_reference(offer.reference).publication == offer.publication == 1
    assert (offer.home, offer.source_request_id) == (fabric.address, "prefill-1")
    # Both names of it are known when the engine declines.
    ports.scheduler.decline(reference)
    with pytest.raises(WrongState):
        ports.scheduler.granted("decode-1")
    assert ports.outcome() is ReleaseOutcome.DECLINED


def test_a_destination_that_gives_up_declines_before_the_publication_comes(fabric: Fabric, ports: Ports) -> None:
    reference = made(fabric)
    ports.scheduler.acquire("decode-1", reference)
    fabric.wait_until_waiting()
    ports.scheduler.decline(reference)
    fabric.wait_until_waiting(0)
    ports.publish(reference)
    assert ports.outcome() is ReleaseOutcome.DECLINED


def test_readers_are_informed_of_a_refused_publication(
    fabric: Fabric, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source found out that it cannot publish, so no reader needs to wait for the rest of the time."""
    reference = made(fabric)
    ports.scheduler.acquire("decode-1", reference, timeout=SOON)
    fabric.wait_until_waiting()

    def refuse(*_: object) -> None:
        raise LimitReached("no", limit="publications", value=1)

    monkeypatch.setattr("kvferry_server.domain.sources.Sources.publish", refuse)
    ports.publish(reference)
    # The publication was not declined.
    assert isinstance(ports.refusal("decode-1"), NotPublished)
    ports.scheduler.acquire("decode-2", reference, timeout=SOON)
    assert isinstance(ports.refusal("decode-2"), NotPublished)


def test_a_client_needs_a_directory_for_references_without_a_home(fabric: Fabric) -> None:
    client: Client = fabric.client()
    with pytest.raises(KvferryError, match="names no home"):
        client.decline(router_reference("", "p"))


def test_requests_of_a_silent_engine_wait_in_turn_and_hold_up_no_other_engine(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._control.lease_holder.ASKED_AT_ONCE", 2)
    silent, other, decode = Engine(fabric, "p"), Engine(fabric, "q"), Engine(fabric, "d")
    references = [made(fabric) for _ in range(4)]
    # The first two wait at the home, the others for their turn, of which the last is cancelled.
    waiting = [decode.read(reference, [10 + index])[0] for index, reference in enumerate(references)]
    fabric.wait_until_waiting(2)
    of_other = made(fabric, "q")
    publish(other, of_other)
    (read,) = decode.read(of_other, MINE)
    assert read.result(SOON).confirmed
    waiting[3].cancel()
    waiting[0].cancel()
    assert isinstance(waiting[0].exception(SOON), TransferCancelled)
    silent.session.publish("request", {"full": Blocks([1], end_token=4)}, reference=references[2])
    assert waiting[2].result(SOON).confirmed
    fabric.wait_until_waiting(1)
    waiting[1].cancel()
    for cancelled in (waiting[1], waiting[3]):
        assert isinstance(cancelled.exception(SOON), TransferCancelled)


def test_a_request_that_waits_for_its_turn_ends_by_its_own_timeout(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._control.lease_holder.ASKED_AT_ONCE", 1)
    decode = Engine(fabric, "d")
    Engine(fabric, "p")
    (first,) = decode.read(made(fabric), [10])
    fabric.wait_until_waiting(1)
    (late,) = decode.read(made(fabric), [11], timeout=0.2)
    assert isinstance(late.exception(SOON), PublicationTimeout)
    first.cancel()
    assert isinstance(first.exception(SOON), TransferCancelled)
