"""What the hostile peer sends."""

from __future__ import annotations

import random

import pytest

from kvferry._wire.authority import incarnation_of
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.fuzz.methods import METHODS
from tests.fuzz.peer import OWN_ID, HostilePeer

WATCHES = 2000


@pytest.mark.parametrize("squats", [False, True])
def test_peer_opens_engines_under_others_names_only_if_it_squats(squats: bool) -> None:
    peer = HostilePeer("127.0.0.1:1", random.Random(1), squats=squats)
    own = {incarnation_of(secret) for secret in peer.secrets}
    for incarnation in (*own, bytes(16)):
        peer.learn_of(pb.EngineRef(engine_id="another", incarnation=bytes(16)))
        peer.learn_of(pb.EngineRef(engine_id=OWN_ID, incarnation=incarnation))
    (watch,) = (method for method in METHODS if method.path == "/kvferry.v1.KVTransfer/Watch")
    drawn = [peer._request("Watch", watch) for _ in range(WATCHES)]
    engines = [request.engine for request in drawn if isinstance(request, pb.WatchRequest)]
    names = {engine.engine_id for engine in engines if engine.incarnation in own}
    peer.close()
    assert (names == {OWN_ID}) is not squats
