"""The effects of an operator's commands on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry import Blocks, ReleaseOutcome
from kvferry._wire.channel import connect
from kvferry.errors import PeerRestarted
from kvferry.v1 import admin_pb2, introspection_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.admin_pb2_grpc import AdminStub
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.caches import Model, shards
from tests.support.engines import Engine
from tests.support.node_servers import NodeServerProcess

MakeEngine = Callable[..., Engine]


@pytest.mark.slow
def test_evicted_engine_gets_an_error_and_its_blocks_back_once(engine: MakeEngine, tmp_path: Path) -> None:
    model = Model()
    with (
        NodeServerProcess(tmp_path / "home", final=1, ttl=1, max_ttl=1, drain=0) as home,
        connect(home.address) as channel,
    ):
        source = engine(home.address, model, shards(4, 1)).ready()
        held = source.session.publish("held", {"full": Blocks([1])})
        ref = pb.EngineRef(engine_id=source.spec.engine_id, incarnation=source.session.token.incarnation)
        AdminStub(channel).EvictEngine(admin_pb2.EvictEngineRequest(engine=ref), timeout=10)
        # The engine's name is free while its process still runs.
        successor = engine(home.address, model, shards(4, 1), engine_id=source.spec.engine_id).ready()
        with pytest.raises(PeerRestarted):
            source.session.publish("refused", {"full": Blocks([2])})
        release = source.release_of(held)
        assert (release.outcome, release.local) == (ReleaseOutcome.FINAL, True)
        assert source.session.unreleased() == ()
        offered = successor.session.publish("offered", {"full": Blocks([1])})
        assert successor.release_of(offered).outcome is not None


def test_drained_node_server_still_reports_releases(engine: MakeEngine, tmp_path: Path) -> None:
    with NodeServerProcess(tmp_path / "home", hold=2, drain=0) as home, connect(home.address) as channel:
        source = engine(home.address, Model(), shards(4, 1)).ready()
        offered = source.session.publish("offered", {"full": Blocks([1])})
        info = IntrospectionStub(channel).GetServerInfo(introspection_pb2.GetServerInfoRequest(), timeout=10)
        AdminStub(channel).Drain(admin_pb2.DrainRequest(home_epoch=info.home_epoch), timeout=10)
        release = source.release_of(offered)
        assert (release.outcome, release.local) == (ReleaseOutcome.UNREAD, False)
