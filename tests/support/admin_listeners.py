"""A client of a node server's admin listener."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

TIMEOUT = 30.0
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Got:
    """An answer."""

    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def get(address: str, path: str, *, method: str = "GET", **headers: str) -> Got:
    """Ask for a path; underscores in the names of headers become hyphens."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of a scrape, by name and labels."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, labels, value = SAMPLE.match(line).groups()  # type: ignore[union-attr]
            found[name, frozenset(LABEL.findall(labels or ""))] = float(value)
    return found


class Scraped:
    """The metrics of a node server at one moment."""

    def __init__(self, address: str) -> None:
        self.text = get(address, "/metrics").text
        self._samples = samples(self.text)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; KeyError if there is none."""
        wanted = set(labels.items())
        found = [value for (other, given), value in self._samples.items() if other == name and wanted <= given]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._samples}

    @property
    def labels(self) -> set[str]:
        return {value for _, given in self._samples for _, value in given}
