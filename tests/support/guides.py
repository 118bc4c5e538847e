"""The commands of a guide, taken from its page and run as they are printed there, but for names that each reader
replaces, ports and folders."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from packaging.requirements import Requirement

from tests.support.repository import ROOT

START_TIMEOUT = 900.0
ENDS = ("curl", "mkdir")
"""Programs whose commands end by themselves."""
DONE_HERE = ("git", "pip")
"""Programs whose commands have made the environment of the tests; what they ask for is compared with it."""


def commands(page: str, heading: str = "") -> list[str]:
    """The commands of the first block of them that a page has under a heading, without the comments behind them."""
    text = (ROOT / page).read_text()
    if heading:
        text = text[text.index(f"\n## {heading}\n") :]
    block = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None, f"{page} has no commands"
    return [re.sub(r"\s+# .*$", "", line) for line in block.group(1).splitlines()]


def added(page: str, first: str) -> list[str]:
    """The options, of which the first is given, that the page says were added to the engines' commands."""
    said = re.search(rf"`({re.escape(first)}[^`]*)`", (ROOT / page).read_text())
    assert said is not None, f"{page} does not say what was added to run it"
    return shlex.split(said.group(1))


def check_installed(command: str) -> None:
    """Check that what a page installs is pinned, and is what the tests run with."""
    for asked in shlex.split(command)[2:]:
        if not asked.startswith("."):
            needed = Requirement(asked)
            assert needed.specifier, f"{asked}: any version may come"
            assert needed.specifier.contains(version(needed.name)), f"{asked}: {version(needed.name)} is installed here"


class Followed:
    """Follows a page's commands from the first to the last. Each that does not end by itself has a log of its own.

    Args:
        page: the page.
        folder: for the logs.
        instead: what to write in place of words of the commands; each must occur.
        more: options for commands that contain a word.
        environment: for all of them.
    """

    def __init__(
        self,
        page: str,
        folder: Path,
        instead: Mapping[str, str],
        more: Mapping[str, list[str]],
        environment: Mapping[str, str],
    ) -> None:
        self._page, self._folder, self._instead, self._more = page, folder, instead, more
        path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        self._environment = {**environment, "PATH": path}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Followed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.started.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.started.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def follow(self, arrived: Mapping[str, Callable[[str], bool]]) -> dict[str, str]:
        """Run all commands; return what those that end have printed.

        Args:
            arrived: by a word of a command that ends, whether what it printed is what a reader waits for. Such a
                command is repeated until it is: servers start for minutes.
        """
        unused = set(self._instead)
        printed = {}
        for command in commands(self._page):
            program = shlex.split(command)[0]
            if program in DONE_HERE:
                if program == "pip":
                    check_installed(command)
                continue
            for word, other in self._instead.items():
                if word in command:
                    unused.discard(word)
                    command = command.replace(word, other)
            if program == "export":
                name, _, value = command.removeprefix("export ").partition("=")
                self._environment[name] = value
            elif program in ENDS:
                printed[command] = self._until(
                    command, next((arrived[word] for word in arrived if word in command), None)
                )
            else:
                for word, options in self._more.items():
                    if word in command:
                        command += " " + shlex.join(options)
                self._start(command)
        assert not unused, f"{self._page} does not say {unused}"
        return printed

    def log(self, word: str) -> str:
        """What the command that contains a word has written."""
        [number] = [number for number, command in enumerate(self.started) if word in command]
        return (self._folder / f"{number}.log").read_text(errors="replace")

    def _start(self, command: str) -> None:
        with (self._folder / f"{len(self.started)}.log").open("wb") as log:
            self.started[command] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until(self, command: str, wanted: Callable[[str], bool] | None) -> str:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            ended = subprocess.run(
                ["bash", "-c", command], cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=120
            )
            if wanted is None:
                assert ended.returncode == 0, f"{command}: {ended.stderr}"
                return ended.stdout
            if ended.returncode == 0 and wanted(ended.stdout):
                return ended.stdout
            for number, (name, process) in enumerate(self.started.items()):
                log = (self._folder / f"{number}.log").read_text(errors="replace")[-4000:]
                assert process.poll() is None, f"{name} has ended: {log}"
            assert time.monotonic() < deadline, f"{command} says {ended.stdout!r} {ended.stderr!r}"
            threading.Event().wait(1.0)
