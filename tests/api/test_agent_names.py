"""A source cannot give its agent the name of another source's: NIXL knows agents by name alone."""

from __future__ import annotations

import grpc
import pytest

from kvferry import Blocks, EngineSpec
from kvferry._cache import runtime_of
from kvferry._wire.token import engine_ref
from kvferry.errors import BadAgentMetadata
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub
from tests.api.conftest import Pair
from tests.support.identifiers import unique_id


def test_an_agent_named_as_another_engines_is_refused(pair: Pair) -> None:
    spec = EngineSpec(unique_id("liar"), pair.source.spec.groups)
    liar = pair.client.open_engine(spec)
    # What a reader of the other engine knows of it.
    request = pb.RegisterCacheRequest()
    request.CopyFrom(runtime_of(pair.source)._registration)
    request.engine.CopyFrom(engine_ref(liar.token))
    request.session_secret = liar.token.session_secret
    with grpc.insecure_channel(pair.node) as channel:
        KVTransferStub(channel).RegisterCache(request, timeout=10)
    lie = liar.publish("lie", {"full": Blocks([12])})
    with pytest.raises(BadAgentMetadata, match="is not named after its engine's incarnation"):
        pair.destination.read(lie.reference, {"full": Blocks([2])}).result(30)
    truth = pair.source.session.publish("truth", {"full": Blocks([11])})
    assert pair.destination.read(truth.reference, {"full": Blocks([1])}).result(30).bytes
    assert (pair.holds(1), pair.holds(2)) == (11, 10_000)
