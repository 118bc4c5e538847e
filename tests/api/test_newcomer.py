"""The usual mistakes in a first engine: each error comes at once, names the place, and says what to do."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvferry
from kvferry import Blocks, Client, EngineSpec, Group, GroupKind
from kvferry._cli import app
from kvferry._clock import now
from kvferry._transport.peer_link import _called
from kvferry._wire.authority import agent_name
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import (
    BadAgentMetadata,
    BadBlock,
    BadGeometry,
    EngineIncomplete,
    InvalidField,
    KvferryError,
    Unreachable,
    WrongState,
)
from kvferry.geometry import file as geometry_file
from kvferry.geometry.tensors import planes_of
from tests.api.conftest import AXES, BLOCKS, TOKENS, array
from tests.support.identifiers import unique_id

GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)


@pytest.mark.parametrize("address", ["http://127.0.0.1:50051", "grpc://node:1", "node", "node:port", "unix:socket", ""])
def test_malformed_addresses_are_refused_when_the_client_is_made(address: str) -> None:
    with pytest.raises(InvalidField, match="unix:/absolute/path or host:port"):
        Client(address)


def test_a_scheme_in_an_address_is_named() -> None:
    with pytest.raises(InvalidField, match="without http://"):
        Client("http://127.0.0.1:50051")


def test_a_rank_that_this_process_has_registered_already_is_named(client: Client) -> None:
    spec = EngineSpec(unique_id("engine"), (GROUP,))
    first = client.register_cache(spec, tensors={"l": array()}, axes=AXES)
    with pytest.raises(WrongState, match=r"rank 0 of engine '.*' is already registered by this process: use the Cache"):
        client.register_cache(spec, tensors={"l": array()}, axes=AXES)
    # Nothing happened to the first one.
    first.session.publish("request", {"full": Blocks([1])})


def test_axes_in_another_order_than_those_of_the_tensor() -> None:
    with pytest.raises(BadGeometry, match=r"axis 'block' has 64, axis 'token' has 2 where a block has 16"):
        planes_of({"l": array()}, ("kv", "block", "token", "head", "content"), GROUP)


def test_axes_that_are_not_named() -> None:
    with pytest.raises(BadGeometry, match=r"its axes are not named, so axis 0 is taken for the blocks: it has 2, and"):
        planes_of({"l": array()}, None, GROUP)


def test_axes_in_one_string() -> None:
    with pytest.raises(InvalidField, match="expected several strings"):
        planes_of({"l": array()}, "kv,block,head,token,content", GROUP)


def test_a_source_that_serves_nothing(client: Client) -> None:
    source = client.register_cache(
        EngineSpec(unique_id("source"), (GROUP,)), tensors={"l": array()}, axes=AXES, serve=False
    )
    reader = client.register_cache(EngineSpec(unique_id("reader"), (GROUP,)), tensors={"l": array()}, axes=AXES)
    publication = source.session.publish("request", {"full": Blocks([1])})
    with pytest.raises(BadAgentMetadata, match="registered with serve=False"):
        reader.read(publication.reference, {"full": Blocks([1])}).result(60)


def test_an_engine_that_reads_its_own_publication_is_refused(client: Client) -> None:
    cache = client.register_cache(EngineSpec(unique_id("engine"), (GROUP,)), tensors={"l": array()}, axes=AXES)
    publication = cache.session.publish("request", {"full": Blocks([1])})
    with pytest.raises(WrongState, match="cannot read from itself"):
        cache.read(publication.reference, {"full": Blocks([2])}).result(60)


def test_a_window_table_is_published_with_its_null_blocks(client: Client) -> None:
    group = Group("full", GroupKind.WINDOW, TOKENS, BLOCKS, window_tokens=TOKENS + 2, null_block=0)
    theirs, mine = array(), array()
    theirs[:], mine[:] = 7, 9
    source = client.register_cache(EngineSpec(unique_id("source"), (group,)), tensors={"l": theirs}, axes=AXES)
    reader = client.register_cache(EngineSpec(unique_id("reader"), (group,)), tensors={"l": mine}, axes=AXES)
    publication = source.session.publish("request", {"full": Blocks([0, 0, 5, 6], end_token=4 * TOKENS)})
    # The null block stays free: the second request has it in its table, too.
    source.session.publish("another", {"full": Blocks([0, 3], end_token=2 * TOKENS)})
    reader.read(publication.reference, {"full": Blocks([0, 0, 1, 2])}).result(60)
    assert (mine[:, 2] == 7).all()
    assert (mine[:, 0] == 9).all()
    with pytest.raises(BadBlock, match="null block"):
        source.session.publish("middle", {"full": Blocks([4, 0, 8], end_token=3 * TOKENS)})


def test_an_empty_list_of_tensors_is_refused(client: Client) -> None:
    with pytest.raises(InvalidField, match=r"tensors is \{\}, expected at least one layer"):
        client.register_cache(EngineSpec(unique_id("engine"), (GROUP,)), tensors={}, axes=AXES)


@pytest.mark.parametrize("call", [lambda client, spec: client.open_engine(spec, timeout=3.0)], ids=["open"])
def test_a_wait_for_a_missing_node_server_is_logged_after_a_second(
    call: Callable[[Client, EngineSpec], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        # Bound, and nobody listens: no other process gets the port meanwhile.
        with Client(address) as client, caplog.at_level(logging.WARNING), pytest.raises(KvferryError):
            call(client, EngineSpec(unique_id("engine"), (GROUP,)))
    assert any(
        "still waiting for" in record.getMessage() and address in record.getMessage() for record in caplog.records
    )


def test_a_read_whose_home_is_away_logs_its_reason(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    cache = client.register_cache(EngineSpec(unique_id("reader"), (GROUP,)), tensors={"l": array()}, axes=AXES)
    with kvferry.serve() as away, Client(away.address) as there:
        source = there.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors={"l": array()}, axes=AXES)
        reference = source.session.publish("request", {"full": Blocks([1])}).reference
        address = away.advertise
    with caplog.at_level(logging.WARNING):
        read = cache.read(reference, {"full": Blocks([1])}, timeout=4.0)
        assert isinstance(read.exception(60), KvferryError)
    said = [
        record.getMessage() for record in caplog.records if "still waiting for publication 1" in record.getMessage()
    ]
    assert len(said) == 1
    assert address in said[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, session, _: session.publish("another", {"full": Blocks([2])}, timeout=4.0),
        lambda client, _, reference: client.decline(reference, timeout=4.0),
    ],
    ids=["publish", "decline"],
)
def test_a_call_to_a_home_that_went_away_warns_once_with_the_reason(
    call: Callable[[Client, kvferry.EngineSession, str], object], caplog: pytest.LogCaptureFixture
) -> None:
    with kvferry.serve() as server, Client(server.address) as client:
        source = client.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors={"l": array()}, axes=AXES)
        publication = source.session.publish("request", {"full": Blocks([1])})
        server.close()
        with caplog.at_level(logging.WARNING), pytest.raises(Unreachable):
            call(client, source.session, publication.reference)
    said = [text for text in caplog.messages if "Is kvferryd running there?" in text]
    assert len(said) == 1
    assert server.address in said[0]


def test_a_publication_before_any_rank_is_registered_names_the_missing_rank(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    session = client.open_engine(EngineSpec(unique_id("engine"), (GROUP,)))
    with caplog.at_level(logging.WARNING), pytest.raises(EngineIncomplete):
        session.publish("request", {"full": Blocks([1])}, timeout=4.0)
    assert len([text for text in caplog.messages if "has registered groups" in text]) == 1


def test_peers_are_named_as_their_engineers_name_them() -> None:
    assert _called(agent_name(b"key", "prefill", 1)) == "rank 1 of engine 'prefill'"
    assert _called(agent_name(b"key", "team/a/prefill", 0)) == "rank 0 of engine 'team/a/prefill'"
    assert _called("another") == "peer 'another'"


def test_a_worker_that_closes_is_not_logged_as_dead(caplog: pytest.LogCaptureFixture) -> None:
    with kvferry.serve(engine_ttl=1.0) as server, Client(server.address) as client:
        scheduler = SchedulerPort(client, EngineSpec(unique_id("engine"), (GROUP,)))
        with Client(server.address) as other, caplog.at_level(logging.WARNING):
            worker = WorkerPort(other, scheduler.spec, token=scheduler.token)
            worker.register({"l": array()}, axes=AXES)
            worker.close()
        until, pause = now() + 60, threading.Event()
        while "rank 0 is gone" not in caplog.text and now() < until:
            pause.wait(0.05)
        assert "rank 0 is gone: its process has ended, or has closed its client" in caplog.text
        scheduler.close()


def test_a_node_server_that_logs_errors_alone_is_ready_without_an_error() -> None:
    command = [
        sys.executable,
        "-m",
        "kvferry_server.node.main",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "",
        "--log-level",
        "error",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        process.communicate(timeout=60)
    assert "INFO kvferryd: kvferryd" in line
    assert "ready: listens on" in line


def test_a_geometry_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prefill.json"
    file.write_text('{"engine_id": "prefill"}')
    with pytest.raises(InvalidField) as raised:
        geometry_file.load(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert raised.value.values["file"] == str(file)
    result = CliRunner().invoke(app, ["plan", "--source", str(file), "--destination", str(file)])
    assert result.exit_code == 2
    assert str(file) in result.output


def test_arrays_are_tensors() -> None:
    assert len(planes_of({"l": np.zeros((2, BLOCKS, 2, TOKENS, 4), np.uint8)}, AXES, GROUP)) == 2
