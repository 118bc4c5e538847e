"""Versions at the client: a node server that is too old for it is named at the first answer, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Client, EngineSpec
from kvferry._wire.geometry_codec import put_together
from kvferry._wire.version import OURS, OURS_ENCODED
from kvferry.errors import ContractDiffers
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.scripted import Scripted, scripted
from tests.support.blocking_control import BlockingControl
from tests.support.caches import Model
from tests.support.identifiers import unique_id

TIMEOUT = 30.0


CALLS: dict[str, Callable[[BlockingControl], Any]] = {
    "RegisterCache": lambda control: control.register_cache(pb.RegisterCacheRequest(), TIMEOUT),
    "Handshake": lambda control: control.handshake(pb.HandshakeRequest(), TIMEOUT),
    "Notify": lambda control: control.notify(pb.NotifyRequest(), TIMEOUT),
    "ReadBlocks": lambda control: control.read_blocks(pb.ReadBlocksRequest(), TIMEOUT),
    "Watch": lambda control: next(control.watch(pb.WatchRequest())),
}


class Speaking(Scripted):
    """A node server that says of its version just what a test says, and keeps what it is told."""

    def __init__(self, said: pb.Version | None) -> None:
        super().__init__()
        self._said = said
        self.told: list[pb.Version] = []

    def _versioned(self, request: Any, answer: Any) -> Any:
        self.told.append(request.version)
        answer.ClearField("version")
        if self._said is not None:
            answer.version.CopyFrom(self._said)
        return answer

    def RegisterCache(self, request: pb.RegisterCacheRequest, context: Any) -> Any:
        return self._versioned(request, super().RegisterCache(request, context))

    def Notify(self, request: pb.NotifyRequest, context: Any) -> Any:
        return self._versioned(request, super().Notify(request, context))

    def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> Any:
        return self._versioned(request, super().ReadBlocks(request, context))

    def Handshake(self, request: pb.HandshakeRequest, context: Any) -> Iterator[Any]:
        yield self._versioned(request, pb.HandshakeResponse())

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[Any]:
        yield self._versioned(request, pb.WatchResponse(opened=pb.WatchOpened()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("said", [None, pb.Version(contract_revision=1, release="0.1.9")], ids=["none", "older"])
def test_a_node_server_that_is_too_old_is_named_at_its_first_answer(
    call: str, said: pb.Version | None, tmp_path: Path
) -> None:
    with scripted(tmp_path, Speaking(said)) as (server, control):
        with pytest.raises(ContractDiffers) as caught:
            CALLS[call](BlockingControl("", control=control))
        assert isinstance(server, Speaking)
        assert server.told == [OURS_ENCODED]
    assert not caught.value.retryable
    assert caught.value.values["party"] == f"the node server {control.address}"
    assert caught.value.values["party_release"] == ("" if said is None else "0.1.9")
    assert caught.value.values["other_revision"] == str(OURS.revision)
    assert f"Upgrade the node server {control.address}" in caught.value.message


def test_a_relay_that_is_too_new_is_named(tmp_path: Path) -> None:
    said = OURS.to_proto()
    said.relay.CopyFrom(pb.RelayVersion(contract_revision=9, oldest_revision=8, release="0.9.0"))
    with scripted(tmp_path, Speaking(said)) as (_, control):
        with pytest.raises(ContractDiffers, match="Upgrade this client") as caught:
            CALLS["RegisterCache"](BlockingControl("", control=control))
        assert caught.value.values["party"] == f"the relay {control.address}"
        assert caught.value.values["party_release"] == "0.9.0"


def test_an_engine_does_not_wait_at_an_older_node_server(tmp_path: Path) -> None:
    spec = EngineSpec(unique_id("engine"), (Model().group(),))
    old = scripted(tmp_path, Speaking(None))
    with old as (_, control), Client(control.address) as client, pytest.raises(ContractDiffers):
        client.open_engine(spec)


def test_a_reader_names_a_source_that_is_too_old_for_it() -> None:
    first = pb.HandshakeResponse(engine=geometry_pb2.EngineGeometry(engine_id="prefill"), num_ranks=0)
    with pytest.raises(ContractDiffers) as caught:
        put_together([first])
    assert caught.value.values["party"] == "the source 'prefill'"
