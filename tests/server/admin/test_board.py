"""The board and the alerts that are shipped: a real Prometheus scrapes a real run and answers every expression of them;
each fault and each alert is where the documents say."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from kvferry._wire.channel import connect
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.admin.metrics import METRICS
from tests.support.admin_listeners import Scraped
from tests.support.faults.scenarios import ROWS
from tests.support.node_servers import Kvferryd, environment, free_port
from tests.support.raw_parties import Party
from tests.support.repository import ROOT
from tests.support.waiting import until

BOARD = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())
RULES = ROOT / "deploy" / "prometheus" / "kvferry-alerts.yml"
SCALED = ROOT / "deploy" / "kubernetes" / "keda" / "decode.yaml"
PANELS = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] != "row"}
ALERTS = dict(re.findall(r"- alert: (\w+)\n +expr: (?:>-\n)?(.*?)\n +(?:for|labels):", RULES.read_text(), re.DOTALL))
MONITORING = (ROOT / "docs" / "monitoring.md").read_text()
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()

NEED_TLS = (
    "kvferry_certificate_expiry_timestamp_seconds",
    "kvferry_authority_expiry_timestamp_seconds",
    "kvferry_tls_handshakes_failed_total",
)
"""Metrics of node servers with TLS only. No other expression may be without data in this run."""

OF_ENGINES = (
    'kvferry_reader_failures_total{reason="PromptMismatch"}',
    'kvferry_failures_total{reason="PromptMismatch"}',
)
"""Metrics of engines only; the tests of those metrics show that they exist from the first scrape on."""

FIRING = {
    "KvferryRestarted",
    "KvferryEngineDied",
    "KvferryLeasesExpire",
    "KvferryReportsTooLate",
    "KvferryRequestsUnread",
}
"""Alerts that this run provokes at once. Other alerts are tested on made-up series."""


class Prometheus:
    """A running Prometheus that scrapes one node server every half second."""

    def __init__(self, folder: Path, target: str) -> None:
        (folder / "kvferry-alerts.yml").write_text(RULES.read_text())
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
            "rule_files: [kvferry-alerts.yml]\n"
            f"scrape_configs: [{{job_name: kvferry, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        self._address = f"127.0.0.1:{free_port()}"
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        """The current series of an expression. Raises if Prometheus does not understand the expression."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def running(self) -> bool:
        try:
            return bool(self.query('up{job="kvferry"} == 1'))
        except OSError:
            return False

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def provoke(server: Kvferryd) -> None:
    """All that makes a series exist: reads good, failed, expired and late, requests unread, refusals, a dead engine."""
    with connect(server.address) as channel:
        party = Party(channel, "engine")
        party.works()
        party.publish()
        late = party.read()
        until(lambda: Scraped(server.admin)("kvferry_leases_ended_total", state="expired") >= 2)
        report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_FAILED)
        party.notify_reader(pb.Notification(read_done=pb.ReadDone(lease_id=late, reports=[report])))
        party.publish()
        party.notify_reader(pb.Notification(read_done=pb.ReadDone(lease_id=party.read(), reports=[report])))
        party.notify_reader(pb.Notification(renew=pb.Renew(lease_id=b"x" * 16)))
        forged = parse_reference(party.reference())
        forged.key = b"x" * 16
        (refused,) = party.notify_reader(pb.Notification(decline=pb.Decline(reference=format_reference(forged))))
        assert refused.HasField("error")
        wrong = pb.NotifyRequest(sender=party.ref, session_secret=secrets.token_bytes(32))
        wrong.notifications.add().abort.publication = 9
        with pytest.raises(grpc.RpcError):
            party.kv.Notify(wrong, timeout=10)
        until(lambda: Scraped(server.admin)("kvferry_released_total", outcome="unread") >= 1)
        party.close()
        until(lambda: Scraped(server.admin)("kvferry_engine_events_total", event="engine_dead") >= 1)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    admin = f"127.0.0.1:{free_port()}"
    flags = ["--unix", str(folder / "node.sock"), "--listen", "", "--drain", "0", "--admin", admin]
    flags += ["--ttl", "1.2", "--engine-ttl", "0.6", "--hold", "1.5"]
    with ExitStack() as stack:
        with Kvferryd(*flags):
            running = Prometheus(folder, admin)
            stack.callback(running.close)
            until(running.running)
        # Prometheus sees the second start as a restart.
        server = stack.enter_context(Kvferryd(*flags))
        until(lambda: bool(running.query("changes(kvferry_start_time_seconds[5m]) > 0")))
        provoke(server)
        # A rate needs two samples.
        until(lambda: bool(running.query('increase(kvferry_engine_events_total{event="engine_dead"}[30s]) > 0')))
        yield running


def concrete(expression: str) -> str:
    """An expression of the board as Grafana sends it."""
    return expression.replace("$__rate_interval", "30s").replace("$instance", ".*")


@pytest.mark.slow
def test_board_expressions_all_have_data(prometheus: Prometheus) -> None:
    without = [
        f"{title}: {target['expr']}"
        for title, panel in PANELS.items()
        for target in panel["targets"]
        if not prometheus.query(concrete(target["expr"])) and not any(name in target["expr"] for name in NEED_TLS)
    ]
    assert without == []


@pytest.mark.slow
def test_signal_by_which_decode_is_scaled_is_a_share_of_the_cache(prometheus: Prometheus) -> None:
    pinned, _ = yaml.safe_load(SCALED.read_text())["spec"]["triggers"]
    of_prefill = 'engine=~"prefill-.*"'
    expression = pinned["metadata"]["query"]
    assert expression.count(of_prefill) == 2
    of_party = expression.replace(of_prefill, 'engine=~"engine-.*"')
    # The engine is dead by now.
    (found,) = prometheus.query(f"max_over_time(({of_party})[5m:1s])")
    assert 0 < float(found["value"][1]) < 0.1
    # Engines that have no cache yet have no share of it, and not NaN.
    of_none = re.sub(r"kvferry_engine_\w+{[^}]*}", "0 * up", expression)
    assert (prometheus.query("0 * up") != [], prometheus.query(of_none)) == (True, [])


@pytest.mark.slow
def test_series_of_every_alert_exist(prometheus: Prometheus) -> None:
    """An alert on a metric that does not exist never fires, whatever its threshold."""
    missing = []
    for alert, expression in ALERTS.items():
        selectors = re.findall(r"(?:kvferry_\w+|\bup\b)(?:\{[^}]*\})?", expression)
        assert selectors, alert
        missing += [
            f"{alert}: {selector}"
            for selector in selectors
            if selector not in (*NEED_TLS, *OF_ENGINES) and not prometheus.query(f"count({selector})")
        ]
    assert missing == []


@pytest.mark.slow
def test_alerts_fire(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(ALERTS)
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []

    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}

    until(lambda: firing() >= FIRING)
    assert not firing() & {"KvferryDown", "KvferryNotReady", "KvferryInternalErrors", "KvferryForcedRelease"}


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_alert_fires_on_its_trouble_and_not_before() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))
    trials = ROOT / "tests" / "server" / "admin" / "alert_trials.yml"
    assert "SUCCESS" in promtool("test", "rules", str(trials))
    tried = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", trials.read_text())
    assert set(tried) == set(ALERTS)


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of docs/monitoring.md."""
    section = MONITORING.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows if not row.startswith("---")][1:]


def test_the_monitoring_page_names_the_alerts_of_each_fault() -> None:
    rows = dict(table("Alerts of each fault"))
    signalled = {row.fault.partition(" to ")[2] for row in ROWS if row.fault.startswith("SIG")}
    killed = {re.split(r", | until ", what)[0] for what in signalled}
    others = {"the network", "a reader that never comes", "repeated messages, malformed requests"}
    assert set(rows) == killed | others
    for fault, alerts in rows.items():
        assert set(alerts.split(", ")) <= {*ALERTS, "none: nothing is lost"}, fault


def test_runbook_has_each_alert_and_names_existing_panels() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(ALERTS)
    for alert, text in sections.items():
        assert "**Do:**" in text, alert
    named = {name for name in PANELS if name in RUNBOOK}
    assert {"Restarts", "Loop lag", "Budgets"} <= named


@pytest.mark.slow
def test_node_server_has_every_metric_of_the_table_and_no_other(prometheus: Prometheus) -> None:
    there = {name for name in prometheus.ask("label/__name__/values") if name.startswith("kvferry_")}
    there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there}
    assert there | set(NEED_TLS) == {metric.full_name for metric, _ in METRICS}
