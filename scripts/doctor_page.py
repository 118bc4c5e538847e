"""Writes what `kvferry doctor` can find into docs/doctor.md, from the table of its texts.

python -m scripts.doctor_page          # write it
python -m scripts.doctor_page --check  # fail if it is not current

The page leaves out findings that need no attention. What they mean, and what to do, the command prints.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvferry._doctor.check import FINDINGS

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"
PLACE = re.compile(r"(<!-- findings of kvferry doctor -->\n).*(<!-- end -->)", re.DOTALL)
CHECK = re.compile(r"^### (.+)\n((?:(?!### ).*\n)*)", re.MULTILINE)
LOOKS = re.compile(r"^Looks at (.+?)\.?$", re.MULTILINE)
ROW = re.compile(r"^\| `([\w-]+)` \| (\w+) \|", re.MULTILINE)


def listed(findings: str) -> str:
    """The checks, with the names of the findings that need attention."""
    lines = ["| check | looks at | may find |", "|---|---|---|"]
    for name, text in CHECK.findall(findings):
        what = LOOKS.search(text)
        rows = [row.groups() for row in ROW.finditer(text)]
        named = [f"`{finding}`{'!' if level == 'problem' else ''}" for finding, level in rows if level != "ok"]
        lines.append(f"| {name} | {what[1] if what else ''} | {' '.join(named)} |")
    return "\n".join(lines)


def main() -> int:
    """Write the page, or check it."""
    page = PAGE.read_text()
    findings = listed(FINDINGS.read_text(encoding="utf-8"))
    current = PLACE.sub(lambda place: f"{place[1]}\n{findings}\n\n{place[2]}", page)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(current)
    elif page != current:
        print("docs/doctor.md is not current: make findings", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
