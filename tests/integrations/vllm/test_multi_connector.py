"""Inside vLLM's MultiConnector, beside another connector, as people add offloading.

The other one is vLLM's ExampleConnector, which keeps blocks in files: its OffloadingConnector runs on devices only
(`v1/kv_offload/cpu/spec.py`, 0.32.0).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry import router_reference
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.vllm_engines import PREFILL, Node, Server, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, offered, pinned, ready, said
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", kv_heads=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    # Nothing here waits for the end of a hold.
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True, hold=600) as server:
        yield server


def multi(
    role: str, address: str, files: Path, *, child: dict[str, Any] | None = None, **transfer: Any
) -> dict[str, Any]:
    """MultiConnector with ours and ExampleConnector, as a transfer configuration."""
    ours = {**kvferry(role, address), **(child or {})}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [ours, example]},
        **transfer,
    }


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(line.rpartition(" ")[2]) for line in server.metrics().splitlines() if line.startswith(name))


def test_kvferry_reads_beside_another_connector(model: Path, home: NodeServerProcess, tmp_path: Path) -> None:
    """Statistics pass from the engines to the API servers, which rebuild them by the connectors' names."""
    servers = [
        Server(
            model,
            tmp_path / f"{role}.log",
            free_port(),
            # The engine's name is MultiConnector's: vLLM takes none in a child's part.
            multi(role, home.address, tmp_path / role, child=child, engine_id=role),
            "--max-num-batched-tokens",
            "64",
        )
        for role, child in (
            ("kv_producer", None),
            # Named by its module, as one does where the entry point is not loaded.
            ("kv_consumer", {"kv_connector_module_path": "kvferry.integrations.vllm"}),
        )
    ]
    try:
        prefill, decode = (server.ready() for server in servers)
        body: dict[str, Any] = {"model": str(model), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for seed in range(3):
            asked = {**body, "prompt": prompt(seed, 90), "max_tokens": 12}
            expected = prefill.complete(asked)["choices"][0]["token_ids"]
            first = prefill.complete({**asked, "max_tokens": 1, "kv_transfer_params": PREFILL})
            answer = decode.complete({**asked, "kv_transfer_params": first["kv_transfer_params"]})
            assert answer["choices"][0]["token_ids"] == expected
        # Both at the same time: prefill publishes what each of its two steps has computed.
        asked = {**body, "prompt": prompt(3, 90), "max_tokens": 12}
        both = {"kvferry_reference": router_reference(home.address, "kv_producer")}
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(decode.complete, {**asked, "kv_transfer_params": {"do_remote_prefill": True, **both}})
            prefill.complete({**asked, "max_tokens": 1, "kv_transfer_params": {**PREFILL, **both}})
            read = reading.result()["choices"][0]["token_ids"]
        assert read == prefill.complete(asked)["choices"][0]["token_ids"]
        assert metric(prefill, "vllm:kvferry_published_total") == 4
        assert metric(decode, "vllm:kvferry_read_total") == 4
        assert metric(decode, "vllm:kvferry_read_move_seconds_count") == 4
        until(lambda: pinned(home) == 0)
        # The other one has done its work, too.
        assert list((tmp_path / "kv_producer").iterdir())
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize(("policy", "child"), [("recompute", {}), ("fail", {"kv_load_failure_policy": "recompute"})])
def test_multi_connector_decides_about_a_failed_read(
    model: Path, home: NodeServerProcess, tmp_path: Path, policy: str, child: dict[str, Any]
) -> None:
    """Ours has a policy of its own in its part of the configuration: by default, "fail"."""
    prefill = Node(model, tmp_path / "prefill.log", connector=kvferry("kv_producer", home.address))
    settings = multi("kv_consumer", home.address, tmp_path / "files", child=child, kv_load_failure_policy=policy)
    decode = Node(model, tmp_path / "decode.log", connector=settings)
    try:
        ready(prefill), ready(decode)
        tokens, other = prompt(5), prompt(6)
        expected = alone(prefill, [tokens, other])
        [broken, good, late] = offered(prefill, [tokens, other, tokens])
        damaged = {**broken, "kvferry_reference": broken["kvferry_reference"][:-6] + "AAAAAA"}
        answers = decode.generate(request(tokens, 12, damaged), request(other, 12, good))
        assert said(answers)[1] == expected[1]
        if policy == "fail":
            assert [answer["finish"] for answer in answers] == ["error", "length"]
        else:
            assert said(answers) == expected
        # The publication of the reference that was damaged, and the one that nobody asked for.
        assert pinned(home) == 2
        assert said(decode.generate(request(tokens, 12, late)))[0] == expected[0]
        shutil.rmtree(tmp_path / "files")
    finally:
        prefill.close()
        decode.close()
