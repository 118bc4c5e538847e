"""The documents, the board and the alerts say of metrics what the tables in the code say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.stats import shown
from kvferry_server.node.logs import ALL_REASONS
from scripts.metric_tables import LISTS
from tests.support.repository import ROOT

METRICS = {metric.full_name: metric for metrics in LISTS.values() for metric in metrics}
SCRAPED = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""
SELECTOR = re.compile(r"\b(?P<name>(?:vllm:)?kvferry_\w+)(?:\{(?P<labels>[^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def in_the_board() -> Iterator[tuple[str, str]]:
    board: Any = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def in_the_alerts() -> Iterator[tuple[str, str]]:
    rules = (ROOT / "deploy" / "prometheus" / "kvferry-alerts.yml").read_text()
    yield from re.findall(r"- alert: (\w+)\n +expr: (?:>-\n)?(.*?)\n +(?:for|labels):", rules, re.DOTALL)


def unknown(expression: str) -> list[str]:
    """What an expression of Prometheus says of our metrics that no table says."""
    found = []
    for selector in SELECTOR.finditer(expression):
        name = selector["name"]
        metric = METRICS.get(name) or METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name))
        if metric is None or (name != metric.full_name) != (metric.kind == "histogram"):
            found.append(name)
            continue
        for label, matches, value in MATCHER.findall(selector["labels"] or ""):
            known = [shown(each) for each in metric.labels.get(label, ())]
            if label not in {*metric.labels, *SCRAPED} or (known and matches in ("=", "!=") and value not in known):
                found.append(f"{name}: {label}{matches}{value}")
    return found


def test_the_tables_of_the_documents_are_made_from_the_code() -> None:
    command = [sys.executable, "-m", "scripts.metric_tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("expressions", [in_the_board, in_the_alerts])
def test_deployed_expressions_use_existing_metrics_labels_and_values(expressions: Any) -> None:
    used = list(expressions())
    assert len(used) > 15
    assert {title: unknown(expression) for title, expression in used if unknown(expression)} == {}


def test_wrong_names_labels_and_values_in_expressions_are_found() -> None:
    assert unknown('sum(rate(kvferry_released{outcome="read"}[5m]))') == ["kvferry_released"]
    assert unknown("kvferry_hold_seconds") == ["kvferry_hold_seconds"]
    assert unknown('kvferry_released_total{state="read"}') == ["kvferry_released_total: state=read"]
    assert unknown('kvferry_released_total{outcome="red",job="j"}') == ["kvferry_released_total: outcome=red"]


def test_metrics_in_documents_exist() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"`((?:vllm:)?kvferry_\w+_(?:total|seconds|bytes|in_progress))\b", page.read_text()))
        assert named - set(METRICS) == set(), page.name


def test_metric_names_follow_prometheus() -> None:
    """A counter's ``_total`` is Prometheus', a name stands once, and each metric has a sentence."""
    assert len(METRICS) == sum(map(len, LISTS.values()))
    for metric in METRICS.values():
        assert re.fullmatch(r"(vllm:)?kvferry_[a-z_]+", metric.name), metric.name
        assert not metric.name.endswith("_total"), metric.name
        assert metric.documentation.endswith("."), metric.name
        assert "|" not in metric.documentation, metric.name


def test_the_reasons_of_failed_handshakes_are_those_of_the_log() -> None:
    assert METRICS["kvferry_tls_handshakes_failed_total"].values == ALL_REASONS
