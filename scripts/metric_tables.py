"""Writes the lists of metrics into the documents: of node servers, of engines and of vLLM.

python -m scripts.metric_tables          # write them
python -m scripts.metric_tables --check  # fail if they are not current

A list stands between two comments, ``<!-- metrics of engines -->`` and ``<!-- end -->``, in any page of docs.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from kvferry import stats
from kvferry.integrations.vllm import metrics as of_vllm
from kvferry.stats import Metric, shown
from kvferry_server.admin import metrics as of_node_servers

DOCS = Path(__file__).parents[1] / "docs"
LISTS: dict[str, list[Metric]] = {
    "node servers": [metric for metric, _ in of_node_servers.METRICS],
    "engines": list(stats.METRICS.values()),
    "vLLM": [metric for metric, _ in of_vllm.METRICS.values()],
}
LIMIT = re.compile(r"The limit of (\w+)\.")
PLACE = re.compile(r"(<!-- metrics of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def listed(metrics: Iterable[Metric]) -> str:
    """The list of some metrics: name, type, labels with their values, meaning. A limit stands beside what it limits."""
    lines: list[str] = []
    for metric in metrics:
        limited = LIMIT.fullmatch(metric.documentation)
        if limited and lines[-1].startswith(f"- `{limited[1]}` "):
            lines[-1] = lines[-1].replace("` ", f"` and `{metric.full_name}` ", 1)
        else:
            lines.append(f"- `{metric.full_name}` ({_kind(metric)}): {metric.documentation}")
    return "\n".join(lines) + "\n"


def list_of(name: str) -> str:
    """The list of a name: of vLLM without meanings, which its own ``/metrics`` says."""
    return named(LISTS[name]) if name == "vLLM" else listed(LISTS[name])


def named(metrics: Iterable[Metric]) -> str:
    """The names of some metrics, by type."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for metric in metrics:
        names[metric.kind].append(f"`{metric.full_name}`")
    return "\n".join(f"- {kind.capitalize()}s: {', '.join(found)}." for kind, found in names.items()) + "\n"


def _kind(metric: Metric) -> str:
    labels = [f"{name}: {', '.join(map(shown, values))}" if values else name for name, values in metric.labels.items()]
    return "; ".join([metric.kind, *labels])


def main() -> int:
    """Write the lists, or check them."""
    stale, found = [], set()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        found |= {name for _, name, _ in PLACE.findall(text)}
        current = PLACE.sub(lambda place: f"{place[1]}\n{list_of(place[2])}\n{place[3]}", text)
        if text != current:
            stale.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(current)
    missing = set(LISTS) - found
    if missing or ("--check" in sys.argv[1:] and stale):
        print(f"not current: {stale}, without a place in docs: {sorted(missing)}: make metrics", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
