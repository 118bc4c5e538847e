"""Writes what `kvferry doctor` can find into docs/doctor.md, from the texts that it prints.

python -m scripts.doctor_page          # write it
python -m scripts.doctor_page --check  # fail if it is not current

The page leaves out findings that need no attention, and remedies, which the command prints.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvferry._doctor.check import FINDINGS

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"
PLACE = re.compile(r"(<!-- findings of kvferry doctor -->\n).*(<!-- end -->)", re.DOTALL)
ROW = re.compile(r"\| `(?P<name>[\w-]+)` \| (?P<level>\w+) \| (?P<means>.*?) ?\| .*\|")


def listed(findings: str) -> str:
    """The checks, with a line for each finding that means something."""
    lines = []
    for line in findings.splitlines():
        if row := ROW.fullmatch(line):
            if row["means"]:
                lines.append(f"- `{row['name']}` ({row['level']}): {row['means']}")
        elif not line.startswith("|"):
            lines.append(line)
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
