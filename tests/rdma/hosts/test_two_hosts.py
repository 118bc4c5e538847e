"""Reads between two hosts, over verbs: every byte, and none beside them."""

from __future__ import annotations

import pytest

from tests.rdma.hosts.host import SOON, Host, Reader, Source, open_engine


@pytest.mark.timeout(600)
def test_a_read_between_two_hosts(hosts: tuple[Host, Host]) -> None:
    source = Source(open_engine([hosts[0].engines], "prefill"))
    reader = Reader(open_engine([hosts[1].engines], "decode", serve=False))
    request = source.publish()
    reading = reader.read(request)
    seen = reading.outcome(SOON)
    assert seen.error is None, seen.error
    assert seen.confirmed
    assert reader.right()
    assert reading.wait_quiet(SOON)
    assert source.released(request, SOON).outcome.name == "READ"
