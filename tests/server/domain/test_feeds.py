"""Feeds of Watches: events are numbered, bounded and resumable."""

from __future__ import annotations

import sys

from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Feed, Process, Role
from kvferry_server.domain.publications import PublicationRecord
from tests.support.parties import P


def feed_with(events: int, kept: int = 4) -> Feed:
    feed = Feed(Process(P, Role.SCHEDULER), kept)
    for rank in range(events):
        feed.push(pb.RankLost(rank=rank))
    return feed


def test_sequences_rise_from_one() -> None:
    assert [sequence for sequence, _ in feed_with(3).after(0)] == [1, 2, 3]


def test_events_that_were_received_are_not_sent_again() -> None:
    feed = feed_with(3)
    assert [sequence for sequence, _ in feed.after(2)] == [3]
    assert feed.after(3) == []
    assert feed.dropped_after(3) == 0


def test_events_are_bounded_and_a_gap_is_counted() -> None:
    feed = feed_with(10)
    assert feed.dropped_after(0) == 6
    assert feed.dropped_after(5) == 1
    assert feed.dropped_after(6) == 0
    assert [sequence for sequence, _ in feed.after(6)] == [7, 8, 9, 10]


def test_sequence_that_was_never_used_cannot_be_resumed() -> None:
    assert feed_with(3).dropped_after(4) is None


def test_acknowledged_release_is_dropped_without_a_gap() -> None:
    publication = PublicationRecord(P, 7)
    feed = feed_with(1)
    feed.push(publication)
    feed.push(pb.RankLost(rank=1))
    held = sys.getrefcount(publication)
    feed.acknowledged({7})
    assert sys.getrefcount(publication) == held - 1
    assert [sequence for sequence, _ in feed.after(0)] == [1, 3]
    assert feed.dropped_after(0) == 0


def test_repeated_release_is_dropped_by_one_acknowledgement() -> None:
    feed, publication = feed_with(0), PublicationRecord(P, 7)
    for event in (publication, pb.RankLost(rank=0), publication):
        feed.push(event)
    feed.acknowledged({7, 8})
    feed.acknowledged({7})
    assert [sequence for sequence, _ in feed.after(0)] == [2]


def test_dropped_release_can_be_acknowledged() -> None:
    feed, publication = feed_with(0, kept=2), PublicationRecord(P, 7)
    for event in (publication, publication, pb.RankLost(rank=0), pb.RankLost(rank=1)):
        feed.push(event)
    assert feed.dropped_after(0) == 2
    feed.acknowledged({7})
    assert [sequence for sequence, _ in feed.after(2)] == [3, 4]
    feed.push(pb.RankLost(rank=2))
    assert (feed.dropped_after(3), [sequence for sequence, _ in feed.after(3)]) == (0, [4, 5])
