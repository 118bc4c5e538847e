"""The board has the form that Grafana's own schema gives boards. Grafana itself does not run here; whether its
expressions have data is for tests/server/admin/test_board.py."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

MODULES = ROOT / "tests" / "support" / "nodejs" / "node_modules"
BOARD = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())

TYPES = """\
import type { Dashboard } from "@grafana/schema";
import type {
  FieldConfig,
  Options,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
// A file has the values of enums, and leaves out what has a default.
type Written<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]?: Written<T[K]> } : T;
"""


def wrong(board: Any, folder: Path) -> str:
    """The errors of TypeScript's compiler for a board."""
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert len(panels) > 20
    lines = [TYPES, f"export const board: Dashboard = {json.dumps(board, indent=1)};"]
    for panel in panels:
        custom = panel["fieldConfig"]["defaults"]["custom"]
        lines.append(f"export const options{panel['id']}: Written<Options> = {json.dumps(panel['options'])};")
        lines.append(f"export const custom{panel['id']}: Written<FieldConfig> = {json.dumps(custom)};")
    (folder / "board.ts").write_text("\n".join(lines))
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(MODULES)
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    command = [str(MODULES / ".bin" / "tsc"), *flags, "board.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.mark.slow
@pytest.mark.skipif(not (MODULES / "@grafana").exists(), reason="tests/support/nodejs is not installed")
def test_board_is_valid_by_grafanas_schema(tmp_path: Path) -> None:
    assert wrong(BOARD, tmp_path) == ""
    # The compiler notices a field and a value that Grafana does not know.
    bad = copy.deepcopy(BOARD)
    bad["panels"][1]["gridpos"] = bad["panels"][1].pop("gridPos")
    bad["panels"][1]["options"]["tooltip"]["mode"] = "many"
    found = wrong(bad, tmp_path)
    assert "'gridpos'" in found or '"gridpos"' in found
    assert '"many"' in found
