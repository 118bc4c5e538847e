"""A fork leaves every public object to the parent: in the child each says so, and ending one there ends nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.slow


def test_methods_in_a_child_raise_forked_client_while_the_parent_reads_on(homes: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "tests.e2e.forked", homes[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
