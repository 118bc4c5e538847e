"""What an operator sees of the reads: vLLM's log, its Prometheus endpoint, and one line for each failed read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvferry.engine import Grant, ReadEnd, ReadTimes
from kvferry.errors import KvferryError, TransferCancelled, TransferExpired, Unreachable
from kvferry.integrations.vllm.metrics import METRICS, REASONS
from kvferry.integrations.vllm.registration import register
from kvferry.integrations.vllm.stats import KvferryStats
from kvferry.integrations.vllm.values import StepMetadata
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, offered, ready, said
from tests.support.waiting import until


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in-multi-connector"])
def test_dump_of_a_dying_engine_has_no_secret(*, nested: bool) -> None:
    """vLLM dumps the step that it died in, with all attributes of what it does not know."""
    grant = Grant(
        request_id="r",
        read_id="id",
        home="home:1",
        engine_id="prefill",
        incarnation=b"i",
        publication=1,
        reference="kvf1.secret",
        source_request_id="s",
        lease_id=b"secret",
        timeout=1.0,
        granted=(),
    )
    ours = StepMetadata(7, "kvt1.secret", [grant])
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = MultiKVConnectorMetadata((ours,)) if nested else ours
    dumped = prepare_object_to_dump(step)
    assert "step=7" in dumped
    assert "secret" not in dumped


def ended(
    error: KvferryError | None = None, handshake: float = 0.0, size: int = 1 << 20, prompt: str = "matched"
) -> ReadEnd:
    times = ReadTimes(wait=0.2, grant=0.001, attach=0.003, handshake=handshake, move=0.04, judge=0.002)
    work: dict[str, Any] = {"descriptors": 40, "staged_bytes": size // 4}
    return ReadEnd("r", "id", error, True, 1, size, times=times, prompt=prompt, **work)


def stats_of(*ends: ReadEnd, granted: bool = True) -> KvferryStats:
    stats = KvferryStats()
    for end in ends:
        stats.read_ended(end, granted=granted)
    return stats


def over_the_wire(data: dict[str, Any]) -> dict[str, Any]:
    """As from an engine's process to its API server."""
    decoded = MsgpackDecoder().decode(MsgpackEncoder().encode(data))
    assert isinstance(decoded, dict)
    return decoded


def test_counts_of_several_engines_and_intervals_add_up() -> None:
    one = stats_of(ended(handshake=0.5), ended(prompt="unmarked"), ended(TransferExpired("late", read_id="id")))
    two = stats_of(ended(), ended(TransferExpired("late", read_id="id")), ended(TransferCancelled("no", read_id="id")))
    two.aggregate(stats_of(ended(Unreachable("gone", address="a:1")), granted=False))
    kept = over_the_wire(two.to_dict())
    total = KvferryStats().aggregate(one).aggregate(KvferryStats(kept))
    counters = [key for key, (metric, _) in METRICS.items() if metric.kind == "counter" and key != REASONS]
    assert {name: total.data.get(name, 0) for name in counters} == {
        "published": 0,
        "unread": 0,
        "prefixes_published": 0,
        "prefixes_asked": 0,
        "prefixes_missed": 0,
        "hints_ignored": 0,
        "read": 3,
        "bytes": 3 << 20,
        "failed": 2,
        "not_granted": 1,
        "cancelled": 1,
        "verified_blocks": 0,
        "unverified_blocks": 0,
        "unmarked": 1,
    }
    assert total.data[REASONS] == {"TransferExpired": 2, "Unreachable": 1}
    assert total.data["staged"] == [0.25] * 3
    assert total.data["handshake"] == [0.5]
    # What was added stays as it is: vLLM goes on using it.
    assert over_the_wire(two.to_dict()) == kept
    assert len(one.data["move"]) == 2
    assert not total.is_empty()
    assert total.reduce()["failed with TransferExpired"] == 2
    assert total.reduce()["move (ms, median)"] == 40.0
    total.reset()
    assert total.is_empty()
    assert KvferryStats().is_empty()


def transfer(**settings: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", **settings)


def test_multi_connector_logs_and_counts_ours_by_its_name() -> None:
    """With vLLM's own code from the engine's output to its log and to Prometheus."""
    register()
    register()
    child = {"kv_connector": "KvferryConnector", "kv_role": "kv_both"}
    config = transfer(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [child]})
    sent = MultiKVConnectorStats()
    sent["KvferryConnector"] = stats_of(ended(), ended(TransferExpired("late", read_id="id")))
    received = over_the_wire(sent.to_dict())
    lines: list[str] = []
    log = KVConnectorLogging(config)
    log.observe(received)
    log.observe(over_the_wire(received))
    log.log(lambda text, values: lines.append(text % values))
    assert "'read': 2" in lines[0]
    assert "'failed with TransferExpired': 2" in lines[0]
    registry = CollectorRegistry()
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)

    def made(kind: Any) -> Any:
        return lambda *arguments, **named: kind(*arguments, registry=registry, **named)

    metrics = MultiConnector.build_prom_metrics(
        VllmConfig(kv_transfer_config=config), {kind: made(kind) for kind in kinds}, ["engine"], {0: ["0"], 1: ["1"]}
    )
    for engine in "01":
        # An alert sees the first one.
        nothing = f'vllm:kvferry_failures_total{{engine="{engine}",reason="PromptMismatch"}} 0.0'
        assert nothing in generate_latest(registry).decode()
    metrics.observe(received, 0)
    metrics.observe(received, 1)
    text = generate_latest(registry).decode()
    assert 'vllm:kvferry_read_total{engine="1"} 1.0' in text
    assert 'vllm:kvferry_failures_total{engine="0",reason="TransferExpired"} 1.0' in text
    assert 'vllm:kvferry_read_move_seconds_sum{engine="0"} 0.04' in text
    assert 'vllm:kvferry_read_staged_share_bucket{engine="0",le="0.25"} 1.0' in text
    for metric, _ in METRICS.values():
        assert metric.full_name in text


@pytest.mark.timeout(600)
def test_integrity_mode_compares_what_decode_has_read(tmp_path: Path) -> None:
    """Switched on in the configuration of both engines, of two ranks and one."""
    model = make_model(tmp_path / "model", kv_heads=4)
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        extra = {"address": home.address, "integrity": {"mode": "full", "patience": 30}}
        prefill, decode = (
            Node(
                model,
                tmp_path / f"{role}.log",
                tp=ranks,
                connector={**kvferry(role, home.address), "kv_connector_extra_config": extra},
            )
            for role, ranks in (("kv_producer", 2), ("kv_consumer", 1))
        )
        try:
            ready(prefill), ready(decode)
            # Decode computes the last token itself, so it reads whole blocks.
            tokens = prompt(1, 97)
            expected = alone(prefill, [tokens])
            # Prefill sums in the steps after the one in which the request ended: beside another request.
            [params, _] = offered(prefill, [tokens, prompt(2, 300)])
            prefill.send("generate", request(prompt(3), 40))
            assert said(decode.generate(request(tokens, 12, params))) == expected
            prefill.answer()
            # 3 blocks of the keys and values of 4 layers and 4 heads.
            assert decode.call("metric", "vllm:kvferry_verified_blocks") == 3 * 2 * 4 * 4
            assert decode.call("metric", "vllm:kvferry_unverified_blocks") == 0
        finally:
            prefill.close()
            decode.close()


@pytest.mark.timeout(600)
def test_failed_read_is_logged_with_the_same_names_by_both_engines(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kv_heads=4)
    with NodeServerProcess(tmp_path / "home", tcp=True) as home:
        prefill = Node(
            model,
            tmp_path / "prefill.log",
            connector=kvferry("kv_producer", home.address, engine_id="the-prefill"),
        )
        # Its pages cannot be cut: each read fails at the handshake.
        decode = Node(
            model,
            tmp_path / "decode.log",
            block=64,
            connector=kvferry("kv_consumer", home.address, engine_id="the-decode", kv_load_failure_policy="recompute"),
        )
        try:
            ready(prefill), ready(decode)
            tokens = prompt(1)
            [params] = offered(prefill, [tokens])
            decode.generate(request(tokens, 4, params))
            [line] = re.findall(r"^.*engine the-decode, failed: .*$", decode.tail(100_000), re.MULTILINE)
            found = re.search(r"publication (\d+) of request '([^']+)', engine the-prefill at", line)
            assert found is not None, line
            assert "Incompatible: " in line
            assert re.search(r"read [0-9a-f]{16} of request \S+, engine", line)

            def noticed() -> bool:
                # It notices when it steps.
                prefill.generate(request(prompt(2), 1))
                return "engine the-prefill, " in prefill.tail(100_000)

            until(noticed)
            [theirs] = re.findall(r"^.*engine the-prefill, .*$", prefill.tail(100_000), re.MULTILINE)
            assert f"publication {found[1]} of request '{found[2]}': DECLINED" in theirs
            assert "failed by 'the-decode'" in theirs
            for log in (prefill.tail(1 << 20), decode.tail(1 << 20)):
                assert params["kvferry_reference"] not in log
            assert decode.call("metric", "vllm:kvferry_failures") == 1
        finally:
            prefill.close()
            decode.close()
