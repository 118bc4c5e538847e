"""Writes the tables of metrics into the documents: of node servers and of engines.

python -m scripts.metric_tables          # write them
python -m scripts.metric_tables --check  # fail if they are not current

A table stands between two comments, ``<!-- metrics of engines -->`` and ``<!-- end -->``, in any page of docs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from kvferry import stats
from kvferry.integrations.vllm import metrics as of_vllm
from kvferry.stats import Metric, shown
from kvferry_server.admin import metrics as of_node_servers

DOCS = Path(__file__).parents[1] / "docs"
TABLES: dict[str, list[Metric]] = {
    "node servers": [metric for metric, _ in of_node_servers.METRICS],
    "engines": list(stats.METRICS.values()),
    "vLLM": [metric for metric, _ in of_vllm.METRICS.values()],
}
"""Those of vLLM are in no table of the documents: docs/vllm.md names each, and vLLM's ``/metrics`` describes it."""
PLACE = re.compile(r"(<!-- metrics of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(metrics: Iterable[Metric]) -> str:
    """The table of some metrics."""
    rows = [
        f"| `{metric.full_name}` | {metric.kind} | {_labels(metric)} | {metric.documentation} |" for metric in metrics
    ]
    return "\n".join(["| metric | type | labels | what it says |", "|---|---|---|---|", *rows, ""])


def _labels(metric: Metric) -> str:
    return "; ".join(
        f"{name}: {', '.join(map(shown, values))}" if values else name for name, values in metric.labels.items()
    )


def main() -> int:
    """Write the tables, or check them."""
    stale, found = [], set()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        found |= {name for _, name, _ in PLACE.findall(text)}
        current = PLACE.sub(lambda place: f"{place[1]}\n{table(TABLES[place[2]])}\n{place[3]}", text)
        if text != current:
            stale.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(current)
    missing = {"node servers", "engines"} - found
    if missing or ("--check" in sys.argv[1:] and stale):
        print(f"not current: {stale}, without a place in docs: {sorted(missing)}: make metrics", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
