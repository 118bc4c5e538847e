"""A source cannot give its agent the name of another source's: NIXL knows agents by name alone."""

from __future__ import annotations

import grpc
import pytest

from kvferry import Blocks, EngineSession, EngineSpec
from kvferry._cache import runtime_of
from kvferry._wire.token import engine_ref
from kvferry.errors import BadAgentMetadata
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.api.conftest import Pair
from tests.support.identifiers import unique_id
from tests.support.stubs import KVTransferStub


@pytest.fixture
def liar(pair: Pair) -> EngineSession:
    return pair.client.open_engine(EngineSpec(unique_id("liar"), pair.source.spec.groups))


def what_readers_know(pair: Pair, liar: EngineSession) -> pb.RegisterCacheRequest:
    """What a reader of the source knows of it, as the registration of another engine."""
    request = pb.RegisterCacheRequest()
    request.CopyFrom(runtime_of(pair.source)._registration)
    request.engine.CopyFrom(engine_ref(liar.token))
    request.session_secret = liar.token.session_secret
    request.ClearField("agent_key")
    return request


def register(pair: Pair, request: pb.RegisterCacheRequest) -> None:
    with grpc.insecure_channel(pair.node) as channel:
        KVTransferStub(channel).RegisterCache(request, timeout=10)


def the_source_is_read_as_before(pair: Pair) -> bool:
    truth = pair.source.session.publish("truth", {"full": Blocks([11])})
    return bool(pair.destination.read(truth.reference, {"full": Blocks([1])}).result(30).bytes) and pair.holds(1) == 11


@pytest.mark.parametrize("key", [b"", bytes(range(32)), b"short"], ids=["none", "another", "short"])
def test_a_home_registers_an_agents_name_only_with_its_key(pair: Pair, liar: EngineSession, key: bytes) -> None:
    request = what_readers_know(pair, liar)
    request.agent_key = key
    with pytest.raises(grpc.RpcError) as refused:
        register(pair, request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    problem = refused.value.details() or ""
    assert "agent_key" in problem
    assert runtime_of(pair.source)._registration.agent_key.hex() not in problem
    assert the_source_is_read_as_before(pair)


def test_readers_refuse_a_name_without_a_key_that_is_not_its_engines(pair: Pair, liar: EngineSession) -> None:
    request = what_readers_know(pair, liar)
    request.agent.name = f"kvferry/{pair.source.session.token.incarnation.hex()}"
    register(pair, request)
    lie = liar.publish("lie", {"full": Blocks([12])})
    with pytest.raises(BadAgentMetadata, match="is named neither after a key nor after its engine's incarnation"):
        pair.destination.read(lie.reference, {"full": Blocks([2])}).result(30)
    assert pair.holds(2) == 10_000
    assert the_source_is_read_as_before(pair)


def test_an_agents_key_is_its_ranks_only(pair: Pair) -> None:
    keys = {runtime_of(cache)._registration.agent_key for cache in (pair.source, pair.destination)}
    assert len(keys) == 2
    assert all(len(key) == 32 for key in keys)
