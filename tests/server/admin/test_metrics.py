"""The metrics of a node server."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

import kvferry
from kvferry._wire.channel import connect
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.admin.metrics import METRICS
from kvferry_server.admin.node_state import NodeState
from kvferry_server.domain.limits import Limits
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import Scraped, get
from tests.support.node_servers import Kvferryd
from tests.support.parties import P2, SECRETS, P, Scene, blocks, registration
from tests.support.raw_parties import Party
from tests.support.waiting import until

SERVICE = "kvferry.v1.KVTransfer/"
SIGNALS = ("pinned_publications", "pinned_bytes", "oldest_pin_age_seconds", "cache_bytes")
OF_ENGINE = re.compile(r'^kvferry_engine_(\w+)\{engine="([^"]*)"\}', re.MULTILINE)


def scraped(
    admin: str, name: str, value: float, /, before: Callable[[], object] = lambda: None, **labels: str
) -> Scraped:
    """Wait until a metric has a value: a scrape may be half a second old. `before` is called before each scrape."""
    found: list[Scraped] = []

    def there() -> bool:
        before()
        found[:] = [Scraped(admin)]
        # Some samples exist only after their first event.
        with suppress(KeyError):
            return found[0](name, **labels) == value
        return False

    until(there)
    return found[0]


@pytest.mark.slow
def test_metrics_count_a_day_of_an_engine(tmp_path: Path) -> None:
    flags = ["--unix", str(tmp_path / "node.sock"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with (
        Kvferryd(*flags, "--drain", "0", "--ttl", "2.5", "--engine-ttl", "1") as server,
        connect(server.addresses[1]) as channel,
    ):
        empty = Scraped(server.admin)
        assert empty("kvferry_ready") == 1
        assert empty("kvferry_leases") == 0
        # A rate needs a first value, so that an alert sees the first event.
        assert empty("kvferry_engines", state="dead") == empty("kvferry_leases_ended_total", state="expired") == 0
        assert empty("kvferry_build_info", version=kvferry.__version__) == 1
        party = Party(channel, "engine")
        party.works()
        wrong = pb.NotifyRequest(sender=party.ref, session_secret=secrets.token_bytes(32))
        wrong.notifications.add().abort.publication = 9
        with pytest.raises(grpc.RpcError):
            party.kv.Notify(wrong, timeout=10)
        party.notify_reader(pb.Notification(renew=pb.Renew(lease_id=b"x" * 16)))

        def renew() -> None:
            """The lease has to be in a scrape, which may come later than the ttl."""
            party.notify_reader(pb.Notification(renew=pb.Renew(lease_id=party.lease_id)))

        refused = {"kind": "renew", "reason": "LEASE_ENDED"}
        seen = scraped(server.admin, "kvferry_notifications_refused_total", 1, renew, **refused)
        assert seen("kvferry_engines", state="ready") == 1
        assert seen("kvferry_ranks", state="registered") == 1
        assert seen("kvferry_watches", role="scheduler") == 1
        assert seen("kvferry_publications", state="published") == 2
        assert seen("kvferry_publications_published_total") == 2
        assert seen("kvferry_leases", state="reading") == 1
        assert seen("kvferry_router_waits") == 0
        assert seen("kvferry_leases_granted_total") == 2
        assert seen("kvferry_leases_ended_total", state="valid") == 1
        assert seen("kvferry_verdicts_total", verdict="valid") == 1
        assert seen("kvferry_read_bytes_total") == 7
        assert seen("kvferry_renewals_total", result="refused") == 1
        assert seen("kvferry_lease_seconds_count") == 1
        assert seen("kvferry_calls_total", method=SERVICE + "RegisterCache", result="OK") == 1
        assert seen("kvferry_calls_total", method=SERVICE + "Notify", result="WRONG_SESSION") == 1
        assert seen("kvferry_call_seconds_count", method=SERVICE + "RegisterCache") == 1
        assert seen("kvferry_calls_in_progress", listener="tcp", kind="stream") == 1
        scraped(server.admin, "kvferry_connections", 1, renew, listener="tcp")
        assert 0 < seen("kvferry_oldest_pin_age_seconds") < 60
        assert 0 < seen("kvferry_budget_used", budget="memory") < seen("kvferry_budget_limit", budget="memory")
        assert seen("process_resident_memory_bytes") > 1 << 20

        # One lease expires, and the engine ends.
        seen = scraped(server.admin, "kvferry_leases_ended_total", 1, state="expired")
        assert seen("kvferry_leases", state="reading") == 0
        party.close()
        seen = scraped(server.admin, "kvferry_engines", 1, state="dead")
        assert seen("kvferry_engine_events_total", event="engine_dead") == 1
        assert seen("kvferry_released_total", outcome="aborted") == 2
        assert seen("kvferry_hold_seconds_count") == 2
        assert seen("kvferry_oldest_pin_age_seconds") == 0
        assert seen("kvferry_watches", role="scheduler") == 0
        # A thread reads it, perhaps after the scrape.
        until(lambda: "engine_dead" in server.log)
        assert "lease_ended" in server.log


def test_engine_budgets_show_the_fullest_engine(tmp_path: Path) -> None:
    """The metric does not name the engine; the page does."""
    flags = ["--unix", "", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "0"]
    with Kvferryd(*flags) as server, connect(server.address) as channel:
        names = ("publications", "checksum_bytes")
        empty = Scraped(server.admin)
        assert [empty("kvferry_engine_budget_used", budget=name) for name in names] == [0, 0]
        one, other = Party(channel, "one"), Party(channel, "other")
        one.live()
        for _ in range(3):
            one.publish()
        other.live()
        seen = scraped(server.admin, "kvferry_engine_budget_used", 4, budget="publications")
        limits = Limits()
        assert seen("kvferry_engine_budget_limit", budget="publications") == limits.publications
        assert seen("kvferry_engine_budget_limit", budget="checksum_bytes") == limits.checksum_bytes
        one.close()
        other.close()


def test_signals_for_autoscalers_are_those_of_each_engine(tmp_path: Path) -> None:
    flags = ["--unix", "", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "0", "--engine-ttl", "1"]
    with Kvferryd(*flags) as server, connect(server.address) as channel:
        busy, idle = Party(channel, "busy"), Party(channel, "idle")
        busy.live()
        busy.publish()
        idle.live()
        idle.notify_reader(pb.Notification(cancel=pb.CancelRead(lease_id=idle.lease_id)))
        idle.notify_reader(pb.Notification(decline=pb.Decline(reference=idle.reference())))
        seen = scraped(server.admin, "kvferry_engine_pinned_publications", 0, engine=idle.name)
        assert seen("kvferry_engine_pinned_bytes", engine=idle.name) == 0
        assert seen("kvferry_engine_oldest_pin_age_seconds", engine=idle.name) == 0
        # Each publication has 4 blocks of the 1,000 of the cache.
        held = seen("kvferry_engine_cache_bytes", engine=busy.name) * 2 * 4 // 1000
        assert seen("kvferry_engine_pinned_publications", engine=busy.name) == 2
        assert seen("kvferry_engine_pinned_bytes", engine=busy.name) == held > 0
        assert 0 < seen("kvferry_engine_oldest_pin_age_seconds", engine=busy.name) < 60
        idle.close()
        busy.close()
        # The series of dead engines end.
        until(lambda: not OF_ENGINE.search(Scraped(server.admin).text))


def test_engine_that_starts_anew_goes_on_with_its_series() -> None:
    """Right after a start of the home, which cannot tell which incarnation is the older."""
    scene = Scene()
    scene.publish(1)
    scene.wait(2.0)
    scene.open(P2)
    scene.sources.begin_snapshot(P2)
    scene.sources.end_snapshot(P2, 0)
    assert len(scene.registry.all_engines()) == 2
    assert signal("pinned_publications", scene) == {"prefill": 1}
    assert signal("oldest_pin_age_seconds", scene) == {"prefill": 2.0}


def signal(name: str, scene: Scene) -> Any:
    """A signal for autoscalers, by engine."""
    node: Any = SimpleNamespace(home=scene, alive=scene.registry.all_engines())
    (value,) = (value for metric, value in METRICS if metric.name == f"kvferry_engine_{name}")
    return value(node)


def test_engine_whose_snapshot_is_awaited_has_no_series() -> None:
    """A home that has restarted does not know what is pinned: a 0 would say that nothing is."""
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish(1)
    assert [signal(name, scene) for name in SIGNALS] == [{}] * len(SIGNALS)
    scene.sources.end_snapshot(P, 1)
    assert signal("pinned_publications", scene) == {"prefill": 1}


def test_pinned_bytes_count_each_block_that_a_step_names() -> None:
    """Before the groups are known, a step may name one twice; what it holds more must not count as less of others."""
    scene = Scene(recovering=True)
    scene.engine.groups = None
    scene.publish(1, groups=(blocks(), blocks(4)))
    scene.publish(2)
    scene.registry.register(registration(), SECRETS[P])
    scene.wait(scene.times.max_ttl)
    assert list(scene.engine.pinned) == [scene.engine.publications[2]]
    assert scene.engine.pinned_bytes == scene.engine.bytes_of(scene.engine.publications[2]) > 0


def test_unknown_methods_share_a_label(watched: Watched) -> None:
    with connect(watched.server.addresses[1]) as channel:
        for name in ("a", "b", "c"):
            call: Any = channel.unary_unary(f"/kvferry.v1.KVTransfer/{name}")
            with pytest.raises(grpc.RpcError):
                call(b"", timeout=10)
    seen = scraped(watched.admin, "kvferry_calls_total", 3, method="unknown", result="NOT_IMPLEMENTED")
    assert not any(label.endswith("/a") for label in seen.labels)


def test_labels_do_not_grow_with_the_fleet(watched: Watched) -> None:
    """Labels are words of the code: no label has an id, or comes from a peer. Only four series are those of an
    engine."""
    seen = Scraped(watched.admin)
    names = OF_ENGINE.findall(seen.text)
    assert sorted(names) == sorted((signal, watched.party.name) for signal in SIGNALS)
    reasons = set(errors_pb2.ErrorReason.keys())
    allowed = re.compile(r"[a-z_]+|[\d.e+-]+|\+Inf|OK|CANCELLED|ABORTED|(kvferry|grpc)[\w.]+/\w+|[\d.]+(rc|dev)?\d*")
    assert [label for label in seen.labels - reasons if not allowed.fullmatch(label)] == [watched.party.name]
    for secret in (watched.party.ref.incarnation.hex(), "request-1"):
        assert secret not in seen.text


async def test_scrape_walks_no_list_that_grows_with_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home may have a quarter of a million leases, and its event loop waits for the scrape."""
    node = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", admin="127.0.0.1:0"))
    await node.start()
    try:
        for name in ("leases", "released", "leases_by_id", "leases_by_read", "reads_by_source", "engines"):
            monkeypatch.setattr(node.home.records, name, None)
        seen = await asyncio.to_thread(Scraped, node.admin)
        assert seen("kvferry_leases", state="reading") == 0
    finally:
        monkeypatch.undo()
        await node.stop(0)


async def test_counting_many_connections_takes_a_small_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of idle connections a count takes tens of milliseconds."""
    node = Mock(spec=NodeState, listeners=[Mock()], connections={}, count_connections=lambda _: time.sleep(0.02))
    pauses = list[float]()

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", slept)
    with pytest.raises(asyncio.CancelledError):
        await NodeState.measure_connections(node)
    assert pauses[0] > 9


def test_scrapes_without_pause_share_a_measurement(watched: Watched) -> None:
    texts = {get(watched.admin, "/metrics").body for _ in range(40)}
    assert len(texts) < 20
