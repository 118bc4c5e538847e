"""Statements about completion that systems of this field get wrong, as named tests: who may free what, and when.

Reports are made by hand here, so that every order and every repetition can be had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSession, EngineSpec, Interval, MemoryKind, MemoryRegion, Publication, Release
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.caches import Model
from tests.support.identifiers import unique_id
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

MODEL = Model()
READER = pb.EngineRef(engine_id="reader", incarnation=b"r" * 16)
DONE, FAILED = pb.RANK_OUTCOME_DONE, pb.RANK_OUTCOME_FAILED


class Home:
    """A source engine, and a reader that reports what the test says."""

    def __init__(self, session: EngineSession, channel: grpc.Channel) -> None:
        self.session = session
        self._stub = KVTransferStub(channel)
        self._introspection = IntrospectionStub(channel)

    def publish(self, name: str, reads: int = 1) -> Publication:
        return self.session.publish(name, {"full": Blocks([1, 2])}, expected_reads=reads)

    def lease(self, publication: Publication, name: str, parties: int) -> bytes:
        read_id = hashlib.sha256(name.encode()).digest()[:16]
        request = pb.ReadBlocksRequest(reference=publication.reference, reader=READER, read_id=read_id, parties=parties)
        return self._stub.ReadBlocks(request, timeout=10).accepted.lease_id

    def report(self, lease_id: bytes, rank: int, outcome: pb.RankOutcome.ValueType = DONE) -> pb.ReadEnded:
        reports = [pb.RankReport(rank=rank, outcome=outcome)]
        notification = pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports))
        answer = self._stub.Notify(pb.NotifyRequest(sender=READER, notifications=[notification]), timeout=10)
        return answer.results[0].read_ended

    def released(self, count: int) -> list[Release]:
        found: list[Release] = []
        while len(found) < count:
            news = self.session.released(timeout=20)
            if not news:
                raise TimeoutError(f"{len(found)} of {count} were released")
            found += news
        return found

    def requests(self) -> list[ipb.RequestSummary]:
        request = ipb.ListRequestsRequest(engine_id=self.session.spec.engine_id)
        return list(self._introspection.ListRequests(request, timeout=10).requests)


@pytest.fixture
def home(homes: tuple[str, str]) -> Iterator[Home]:
    memory = np.zeros(MODEL.rank_bytes(Interval(0, 4)), np.uint8)
    base = memory.ctypes.data
    with Client(homes[0]) as client, grpc.insecure_channel(homes[0]) as channel:
        cache = client.register_cache(
            EngineSpec(unique_id("source"), (MODEL.group(),)),
            planes=MODEL.planes(Interval(0, 4), base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, memory.nbytes)],
            keep=memory,
            serve=False,
        )
        yield Home(cache.session, channel)


def test_04_source_frees_after_all_distinct_consumers_and_not_before(home: Home) -> None:
    publication = home.publish("four")
    lease = home.lease(publication, "r", parties=3)
    home.report(lease, 0)
    home.report(lease, 1)
    # A counter would be at three after this; a set stays at two.
    ended = home.report(lease, 0)
    assert (ended.reported, ended.complete) == (2, False)
    assert home.session.released() == []
    assert home.session.unreleased() == (publication,)
    assert home.report(lease, 2).complete
    (release,) = home.released(1)
    assert [(read.reported, read.parties) for read in release.reads] == [(3, 3)]


def test_08_failed_rank_fails_the_read_once_and_a_retry_finds_the_blocks(home: Home) -> None:
    publication = home.publish("eight")
    lease = home.lease(publication, "first", parties=2)
    home.report(lease, 0, FAILED)
    assert home.report(lease, 1).complete
    assert home.session.unreleased() == (publication,)
    retry = home.lease(publication, "second", parties=2)
    home.report(retry, 0)
    home.report(retry, 1)
    (release,) = home.released(1)
    first, second = sorted(release.reads, key=lambda read: read.lease_number)
    assert (first.state, second.state) == ("failed", "valid")


def test_09_hold_ends_under_the_sources_request_id(home: Home) -> None:
    publication = home.publish("the source's own name")
    home.report(home.lease(publication, "the reader's name", parties=1), 0)
    assert [release.request_id for release in home.released(1)] == ["the source's own name"]


def test_11_good_case_waits_for_no_timeout(home: Home) -> None:
    # The home's times are the defaults: a lease of 30 s, a hold of 120 s. `released` comes without either.
    publication = home.publish("eleven")
    home.report(home.lease(publication, "r", parties=1), 0)
    assert home.session.released(timeout=20)[0].outcome.name == "READ"


def test_12_completion_counts_belong_to_each_read_and_nothing_is_left_over(home: Home) -> None:
    random = np.random.default_rng(12)
    waiting: list[tuple[int, bytes, int]] = []
    for index in range(300):
        parties = int(random.integers(1, 9))
        publication = home.publish(f"twelve-{index}", reads=2)
        for name in ("a", "b"):
            lease = home.lease(publication, name, parties)
            waiting += [(publication.number, lease, rank) for rank in range(parties)]
    random.shuffle(waiting)
    last = {number: position for position, (number, _, _) in enumerate(waiting)}
    finished = []
    for position, (number, lease, rank) in enumerate(waiting):
        home.report(lease, rank)
        if last[number] == position:
            finished.append(number)
    assert [release.publication for release in home.released(300)] == finished
    assert home.session.unreleased() == ()
    # The home forgets a publication once its source has said that it heard of the release.
    until(lambda: home.requests() == [])
