"""What a client counts and measures, told as plain values and to Prometheus: each number changes by what it is of."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import product
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvferry import Blocks, Prompt
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import InvalidField, KvferryError, PromptMismatch, TransferFailed
from kvferry.integrations.prometheus import ClientCollector
from kvferry.stats import Distribution
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import AXES, HEADS, LAYERS, SOON, Engine, kv

VALUES = kv(tokens=8)
THEIRS, MINE = [3, 1], [5, 6]


@pytest.fixture
def pair(fabric: Fabric) -> tuple[Engine, Engine]:
    return Engine(fabric, "p"), Engine(fabric, "d")


def samples(*collectors: ClientCollector) -> dict[tuple[str, str], float]:
    """What Prometheus would read, by name and by the value of the only label."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    measured = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        measured.add(value)
    assert (measured.counts, measured.sum, measured.count) == ([2, 1, 1], 10.0, 4)


def test_a_read_is_counted_and_its_stages_are_measured(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (read,) = decode.read(prefill.publish(VALUES, THEIRS).reference, MINE)
    result = read.result(SOON)
    stats = decode.workers[0].stats()
    reads, ranks = stats.reads, stats.ranks
    assert reads.outcomes == {"done": 1, "failed": 0, "cancelled": 0, "expired": 0, "not_granted": 0, "missed": 0}
    assert (reads.failures, set(reads.stages.values())) == ({"PromptMismatch": 0}, {0})
    for measured in (reads.wait, reads.grant, reads.attach, reads.judge, reads.size):
        assert measured.count == 1
    for measured in (ranks.handshake, ranks.plan, ranks.move):
        assert (measured.count, 0 < measured.sum < SOON) == (1, True)
    assert reads.size.sum == ranks.bytes == VALUES.nbytes
    assert (ranks.pieces, ranks.descriptors, ranks.staged_bytes) == (result.pieces, result.descriptors, 0)
    assert 0 < ranks.descriptors <= ranks.pieces
    assert (ranks.transfers, ranks.uncertain_bytes, ranks.quarantined_bytes, ranks.agents) == (0, 0, 0, 1)
    # The source is known from now on.
    (again,) = decode.read(prefill.publish(VALUES, [8, 9]).reference, [10, 11])
    again.result(SOON)
    ranks = decode.workers[0].stats().ranks
    assert (ranks.handshake.count, ranks.plan.count, ranks.bytes) == (1, 2, 2 * VALUES.nbytes)
    # What was returned before stays as it was.
    assert (reads.outcomes["done"], reads.wait.count, stats.ranks.plan.count) == (1, 1, 1)


def test_reads_are_counted_by_what_marks_say_of_their_prompts(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    client = decode.workers[0]
    collector = ClientCollector(client)
    assert samples(collector)["kvferry_reader_failures_total", "PromptMismatch"] == 0
    prompts = Prompt(range(8)), Prompt.unknown
    blocks = {"full": Blocks(THEIRS, end_token=8)}
    for theirs, mine in product(prompts, prompts):
        reference = prefill.session.publish("request", blocks, prompt=theirs).reference
        (read,) = decode.read(reference, MINE, prompt=mine)
        read.result(SOON)
        prefill.session.released(timeout=SOON)
    reference = prefill.session.publish("request", blocks, prompt=prompts[0]).reference
    (read,) = decode.read(reference, MINE, prompt=Prompt(range(1, 9)))
    with pytest.raises(PromptMismatch):
        read.result(SOON)
    assert client.stats().reads.prompts == {"matched": 1, "unmarked": 1, "unknown": 2}
    found = samples(collector)
    assert found["kvferry_reader_failures_total", "PromptMismatch"] == 1
    assert [found["kvferry_reader_prompts_total", name] for name in ("matched", "unmarked", "unknown")] == [1, 1, 2]


def test_publications_are_held_until_they_are_released(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    publication, _ = prefill.publish(VALUES, THEIRS), prefill.publish(VALUES, [8, 9], "other")
    source = prefill.scheduler.stats().source
    assert (source.published, source.held, set(source.released.values())) == (2, 2, {0})
    decode.read(publication.reference, MINE)[0].result(SOON)
    prefill.session.released(timeout=SOON)
    source = prefill.scheduler.stats().source
    assert (source.published, source.held, source.released["read"]) == (2, 1, 1)
    prefill.session.close()
    assert prefill.scheduler.stats().source.held == 0
    # Another start of the engine goes on with the totals.
    prefill.scheduler.open_engine(prefill.spec, timeout=SOON)
    assert prefill.scheduler.stats().source.published == 2


def test_bytes_that_may_still_be_written_are_uncertain_and_were_in_quarantine(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    client = decode.workers[0]
    publication = prefill.publish(VALUES, THEIRS)
    with prefill.fabric.hold_reads() as held:
        (read,) = decode.read(publication.reference, MINE)
        held.wait()
        stats = client.stats()
        assert (stats.reads.stages["reading"], stats.ranks.transfers, stats.ranks.uncertain_bytes) == (1, 1, 0)
        read.cancel()
        read.exception(SOON)
        ranks = client.stats().ranks
        assert (ranks.uncertain_bytes, ranks.quarantined_bytes) == (VALUES.nbytes, VALUES.nbytes)
    assert read.wait_quiet(SOON)
    stats = client.stats()
    assert (stats.ranks.uncertain_bytes, stats.ranks.quarantined_bytes) == (0, VALUES.nbytes)
    assert stats.reads.outcomes["cancelled"] == 1


def test_a_broken_connection_retires_an_agent_and_its_reads_count_as_failed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    publication = prefill.publish(VALUES, THEIRS)
    prefill.fabric.fail_reads()
    (read,) = decode.read(publication.reference, MINE)
    with pytest.raises(TransferFailed):
        read.result(SOON)
    assert read.wait_quiet(SOON)
    stats = decode.workers[0].stats()
    assert (stats.reads.outcomes["failed"], stats.reads.failures["TransferFailed"]) == (1, 1)
    assert (stats.ranks.agents_retired, stats.ranks.quarantined_bytes) == (1, VALUES.nbytes)
    until(lambda: decode.workers[0].stats().ranks.retired_agents == 0)


def test_an_outage_of_a_home_is_seen_while_it_lasts(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    client = decode.workers[0]
    before = client.stats().calls
    assert (before.calls > 0, before.homes, before.unreachable, before.unreachable_seconds) == (True, 1, 0, 0.0)
    publication = prefill.publish(VALUES, THEIRS)
    prefill.fabric.stop_home()
    (read,) = decode.read(publication.reference, MINE, timeout=1.0)
    with pytest.raises(KvferryError):
        read.result(SOON)
    calls = client.stats().calls
    assert calls.failed["Unreachable"] >= 1
    assert (calls.retried >= calls.failed["Unreachable"], calls.unreachable) == (True, 1)
    assert calls.unreachable_seconds > 0.0
    prefill.fabric.start_home()
    until(lambda: client.stats().calls.unreachable == 0)
    # At its deadline, or because its home cannot be asked whether its bytes count.
    outcomes = client.stats().reads.outcomes
    assert outcomes["failed"] + outcomes["expired"] == 1


def granted(scheduler: SchedulerPort, request: str) -> bool:
    return scheduler.granted(request) is not None


def finished(scheduler: SchedulerPort, worker: WorkerPort) -> bool:
    scheduler.collect(worker.finished())
    return bool(scheduler.finished())


def test_the_ports_of_a_client_are_counted_with_it(fabric: Fabric) -> None:
    """One process with a scheduler and its only worker."""
    prefill, client = Engine(fabric, "p"), fabric.client()
    spec = Engine(fabric, "other").spec
    spec = type(spec)("d", spec.groups, 1)
    scheduler = SchedulerPort(client, spec)
    worker = WorkerPort(client, spec)
    memory = prefill._memory(HEADS)
    tensors = {f"layer{layer}": memory[layer] for layer in range(LAYERS)}
    worker.register(tensors, axes=AXES["hnd"], heads=range(HEADS), total_heads=HEADS)
    for request, end in (("a", scheduler.cancel), ("b", None)):
        scheduler.acquire(request, prefill.publish(VALUES, THEIRS, request).reference)
        until(partial(granted, scheduler, request))
        if end is not None:
            end(request)
            continue
        worker.start(scheduler.attach(request, {"full": Blocks(MINE)}))
        until(partial(finished, scheduler, worker))
    stats = client.stats()
    assert (stats.reads.outcomes["done"], stats.reads.outcomes["cancelled"], stats.ranks.bytes) == (1, 1, VALUES.nbytes)
    scheduler.close()


def test_prometheus_gets_the_same_numbers(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.read(prefill.publish(VALUES, THEIRS).reference, MINE)[0].result(SOON)
    prefill.session.released(timeout=SOON)
    found = samples(ClientCollector(decode.workers[0]))
    assert found["kvferry_reader_reads_total", "done"] == 1
    assert found["kvferry_reader_reads_in_progress", "waiting"] == 0
    assert found["kvferry_reader_bytes_total", ""] == found["kvferry_reader_read_bytes_sum", ""] == VALUES.nbytes
    assert found["kvferry_reader_move_seconds_count", ""] == found["kvferry_reader_move_seconds_bucket", "+Inf"] == 1
    # Both engines of a process, told apart.
    both = samples(ClientCollector({"prefill": prefill.scheduler, "decode": decode.workers[0]}))
    assert both["kvferry_source_released_total", "prefill,read"] == 1
    assert both["kvferry_source_released_total", "decode,read"] == 0
    assert both["kvferry_reader_bytes_total", "decode"] == VALUES.nbytes


def test_no_name_is_there_twice_and_a_registry_refuses_a_second_collector(fabric: Fabric) -> None:
    collector = ClientCollector(fabric.client())
    names = [family.name for family in collector.collect()]
    assert len(names) == len(set(names)) == len(list(collector.describe()))
    assert all(name.startswith(("kvferry_reader_", "kvferry_source_", "kvferry_client_")) for name in names)
    with pytest.raises(ValueError, match="Duplicated"):
        samples(collector, ClientCollector(fabric.client()))


def test_labels_do_not_grow_with_the_traffic(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair

    def lines() -> int:
        return len(samples(ClientCollector({"p": prefill.scheduler, "d": decode.workers[0]})))

    counts = []
    for number in range(3):
        publication = prefill.publish(VALUES, [2 * number, 2 * number + 1], f"request {number}")
        decode.read(publication.reference, [10 + 2 * number, 11 + 2 * number])[0].result(SOON)
        counts.append(lines())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("wrong", [None, {"a": 3}, {3: None}, ["client"]])
def test_only_clients_are_collected(wrong: Any) -> None:
    with pytest.raises(InvalidField, match="clients"):
        ClientCollector(wrong)


# In a process of its own: what other tests started in this one, such as gRPC's threads, survives no fork.
FORKED = """
import os
from kvferry.integrations.prometheus import ClientCollector
from kvferry.testing import Fabric

with Fabric() as fabric:
    collector = ClientCollector(fabric.client())
    child = os.fork()
    collected = sum(len(family.samples) for family in collector.collect())
    if not child:
        os._exit(collected)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), collected > 0)
"""


def test_a_child_of_a_fork_collects_nothing_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert done.stdout == "0 True\n", done.stderr


def test_totals_stay_when_a_client_is_closed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.read(prefill.publish(VALUES, THEIRS).reference, MINE)[0].result(SOON)
    decode.workers[0].close()
    stats = decode.workers[0].stats()
    assert (stats.reads.outcomes["done"], stats.ranks.bytes) == (1, VALUES.nbytes)


def test_the_sdk_imports_no_metrics_library() -> None:
    code = "import sys, kvferry, kvferry.stats; kvferry.Client; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
