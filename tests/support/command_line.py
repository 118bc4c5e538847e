"""The command `kvferry`, run in this process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from kvferry._cli import main
from tests.support.node_servers import environment


def run_kvferry(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which is quicker than a new one."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    variables = {**environment(**env), "NO_COLOR": "1", "COLUMNS": "200"}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(sys, "argv", ["kvferry", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return subprocess.CompletedProcess(["kvferry", *arguments], code, out.getvalue(), err.getvalue())
