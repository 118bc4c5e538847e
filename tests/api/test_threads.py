"""A client has few threads, all of them known to docs/architecture.md, and leaves none behind."""

from __future__ import annotations

import fnmatch
import re
import threading

import numpy as np

import kvferry
from kvferry import Blocks, Client, EngineSpec, Group
from tests.support.identifiers import unique_id
from tests.support.repository import ROOT
from tests.support.waiting import until

GROUP = Group("full", block_tokens=16, num_blocks=8)
AXES = ("kv", "block", "head", "token", "content")

SERVERS = {"kvferry-server", "_poll_wrapper"}
"""Threads of an embedded node server."""


def running() -> set[threading.Thread]:
    return set(threading.enumerate())


def name_of(thread: threading.Thread) -> str:
    """Of threads without a name of their own, the function that they run."""
    found = re.fullmatch(r"Thread-\d+ \((.*)\)", thread.name)
    return found[1] if found else thread.name


def test_threads_after_a_read_are_one_loop_one_per_watch_and_those_of_grpc_and_nixl() -> None:
    before = running()
    theirs, mine = (np.zeros((2, 8, 1, 16, 4), np.float32) for _ in range(2))
    with kvferry.serve() as server, Client(server.address) as client:
        source = client.register_cache(EngineSpec(unique_id("p"), (GROUP,)), tensors={"layer": theirs}, axes=AXES)
        reader = client.register_cache(EngineSpec(unique_id("d"), (GROUP,)), tensors={"layer": mine}, axes=AXES)
        publication = source.session.publish("request", {"full": Blocks([1, 2])})
        reader.read(publication.reference, {"full": Blocks([3, 4])}).result(20)
        # The thread of the handshake ends on its own.
        until(lambda: not any("handshake" in name_of(each) or "plan" in name_of(each) for each in running() - before))
        names = sorted(name_of(each) for each in running() - before)
    mine_only = [name for name in names if name not in SERVERS]
    assert len(mine_only) == 5, names
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| (`.*?`) \|", page.partition("\n## Threads\n")[2].partition("\n## ")[0], re.MULTILINE)
    known = [pattern.replace("…", "*") for row in table for pattern in re.findall(r"`(.*?)`", row)]
    known = [re.sub(r"^Thread-\* \((.*)\)$", r"\1", pattern) for pattern in known]
    assert not [name for name in mine_only if not any(fnmatch.fnmatchcase(name, pattern) for pattern in known)]
    until(lambda: not {name_of(each) for each in running() - before} - {"_poll_wrapper"})
