"""The process of one check; see `kvferry._doctor.isolation`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvferry._doctor.catalogue import CHECKS
from kvferry._doctor.host import Host
from kvferry._doctor.isolation import end_with


def main() -> None:
    """Run the check that is named, and write what it finds."""
    asked = json.loads(sys.stdin.read())
    end_with(asked.pop("parent"))
    answer = Path(asked.pop("answer"))
    host = Host(**{**asked, "root": Path(asked["root"]), "environ": dict(os.environ)})
    check = next(check for check in CHECKS if check.name == sys.argv[1])
    findings = check.look(host)
    whole = answer.with_suffix(".whole")
    whole.write_text(json.dumps([found.as_dict() for found in findings]))
    whole.rename(answer)
    # Without the ends of libraries, whose faults are not those of the check.
    os._exit(0)


if __name__ == "__main__":
    main()
