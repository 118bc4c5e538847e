"""A hostile peer in a process of its own, beside the rounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from tests.support.repository import ROOT

PAUSE = 0.05
"""Seconds between twenty calls: it is to be in the way, not to take the machine."""


class Hostile:
    """Attacks node servers until the end of the block.

    Attributes:
        calls: that it made; known at the end.
    """

    def __init__(self, addresses: Sequence[str], seed: int) -> None:
        self.calls = 0
        arguments = [*addresses, "--seed", str(seed), "--pause", str(PAUSE), "--no-squat"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.peer", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End it. Raises if it has ended by itself: then nothing was attacked."""
        try:
            said, failed = self._process.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return
        if self._process.returncode != 0:
            raise RuntimeError(f"the hostile peer ended:\n{failed[-4000:]}")
        self.calls = int(said)

    def __enter__(self) -> Hostile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
