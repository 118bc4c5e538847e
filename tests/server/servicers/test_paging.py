"""Pages of a list: whole by count and by bytes."""

from __future__ import annotations

from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.servicers.introspection import make_token, page
from kvferry_server.servicers.limits import LISTING_PAGE_BYTES
from tests.support.parties import P


def listed(sizes: dict[int, int], page_size: int) -> list[list[int]]:
    """Return the numbers on each page, for entries of these sizes in bytes."""

    def encode(number: int) -> ipb.RequestSummary:
        return ipb.RequestSummary(publication=number, request_id="x" * sizes[number])

    entries, pages, token = dict[int, int](), [], ""
    for number in reversed(sizes):
        entries[number] = number
    while True:
        found, token = page({P: entries}, encode, page_size, token)
        assert sum(message.ByteSize() for message in found) <= LISTING_PAGE_BYTES or len(found) == 1
        pages.append([message.publication for message in found])
        if not token:
            return pages


def test_a_page_is_limited_by_count_and_by_bytes_and_nothing_is_skipped() -> None:
    assert listed({}, 2) == [[]]
    assert listed(dict.fromkeys(range(1, 6), 10), 2) == [[1, 2], [3, 4], [5]]
    third = LISTING_PAGE_BYTES // 3 - 2000
    assert listed(dict.fromkeys(range(1, 6), third), 1000) == [[1, 2, 3], [4, 5]]
    # An entry larger than a page is still sent.
    assert listed({1: 10, 2: LISTING_PAGE_BYTES + 1, 3: 10}, 1000) == [[1], [2], [3]]


def test_a_late_page_of_a_long_list_does_not_compare_all_entries_before_it() -> None:
    """The event loop waits meanwhile, for each of a thousand pages."""
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    entries: dict[int, int] = {Counted(number): number for number in range(1000)}
    compared = 0
    found, _ = page({P: entries}, lambda number: ipb.RequestSummary(publication=number), 10, make_token((P, 989)))
    assert [message.publication for message in found] == list(range(990, 1000))
    assert compared < 100
