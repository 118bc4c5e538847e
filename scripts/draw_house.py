"""Draws the folders of kvferry and what imports what, as docs/house.svg.

python scripts/draw_house.py          # write it
python scripts/draw_house.py --check  # fail if it is not current

An arrow leads from a folder to one that it imports, unless the way through others says so already.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "house.svg"
PACKAGES = {"kvferry": ROOT / "client" / "kvferry", "kvferry_server": ROOT / "server" / "kvferry_server"}
BASE = frozenset({"errors", "v1", "_arguments", "_clock", "_forks", "_threads", "_loop"})
"""What nearly everything imports: drawn once, without arrows."""

WIDTH, HEIGHT, GAP, MARGIN = 150, 44, 34, 24
FONT = "ui-sans-serif, system-ui, sans-serif"


def folders(package: Path) -> Iterator[tuple[str, Path]]:
    """The files of a package, with the folder or single module that each belongs to."""
    for path in sorted(package.rglob("*.py")):
        top = path.relative_to(package).parts[0].removesuffix(".py")
        if top != "__init__":
            yield top, path


def imported(path: Path, package: str) -> Iterator[str]:
    """Folders of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1:
                yield parts[1]


def graph(package: str) -> dict[str, set[str]]:
    """What each folder imports, without itself and what nearly everything imports."""
    found: dict[str, set[str]] = defaultdict(set)
    every = {top for top, _ in folders(PACKAGES[package])}
    for top, path in folders(PACKAGES[package]):
        if top not in BASE:
            found[top] |= {name for name in imported(path, package) if name in every} - BASE - {top}
    return dict(found)


def reach(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that a folder imports, also by way of others."""
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges[name])
    return found


def floors(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of each folder: one above the highest that it imports."""
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((floor(other) for other in edges[name]), default=-1)
        return known[name]

    for name in edges:
        floor(name)
    return known


def draw(package: str, top: int) -> tuple[list[str], int, int]:
    """The boxes and arrows of a package, its width, and where it ends."""
    edges = graph(package)
    floor_of = floors(edges)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(edges):
        rows[floor_of[name]].append(name)
    width = max(len(row) for row in rows.values()) * (WIDTH + GAP)
    place: dict[str, tuple[int, int]] = {}
    for floor, row in rows.items():
        left = MARGIN + (width - len(row) * (WIDTH + GAP)) // 2
        for column, name in enumerate(row):
            place[name] = left + column * (WIDTH + GAP), top + (max(rows) - floor) * (HEIGHT + GAP)
    lines = []
    for name, others in sorted(edges.items()):
        direct = {other for other in others if not any(other in reach(edges, way) for way in others - {other})}
        for other in sorted(direct):
            (x1, y1), (x2, y2) = place[name], place[other]
            lines.append(
                f'<line x1="{x1 + WIDTH // 2}" y1="{y1 + HEIGHT}" x2="{x2 + WIDTH // 2}" y2="{y2 - 3}" '
                'stroke="#8a8f98" marker-end="url(#arrow)"/>'
            )
    for name, (x, y) in sorted(place.items()):
        fill = "#eef1f5" if name.startswith("_") else "#dcecff"
        lines.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" '
            f'stroke="#5a6472"/><text x="{x + WIDTH // 2}" y="{y + 27}" text-anchor="middle">{escape(name)}</text>'
        )
    return lines, width, top + (max(rows) + 1) * (HEIGHT + GAP)


def described() -> str:
    """The arrows in words."""
    every = {name: others for package in PACKAGES for name, others in graph(package).items()}
    return ". ".join(f"{name} imports {', '.join(sorted(others)) or 'none of them'}" for name, others in every.items())


def picture() -> str:
    """The picture as SVG."""
    client, width, end = draw("kvferry", 60)
    server, width_server, bottom = draw("kvferry_server", end + 60)
    base = ", ".join(sorted(BASE))
    body = "\n".join(
        [
            f'<text x="{MARGIN}" y="36" font-weight="bold">client/kvferry</text>',
            *client,
            f'<text x="{MARGIN}" y="{end + 8}">below them all: {escape(base)}</text>',
            f'<text x="{MARGIN}" y="{end + 44}" font-weight="bold">server/kvferry_server</text>',
            *server,
        ]
    )
    wide = max(width, width_server) + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {bottom}" role="img" '
        f'aria-labelledby="title desc" font-family="{FONT}" font-size="14">\n'
        '<title id="title">The folders of kvferry, and what imports what</title>\n'
        f'<desc id="desc">{escape(described())}</desc>\n'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#8a8f98"/></marker></defs>\n'
        f'<rect width="{wide}" height="{bottom}" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> int:
    """Write the picture, or check it."""
    if "--check" in sys.argv[1:]:
        if PICTURE.read_text() == picture():
            return 0
        print("docs/house.svg is not current: make house", file=sys.stderr)
        return 1
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
