"""A machine, its programs, its cards and its cables, as a test holds them."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.support.machines.image import EMULATOR, Image
from tests.support.repository import ROOT

BOOT = 300
"""Seconds that a machine may take to boot; on an idle host it takes five."""
ANSWER = 120.0
"""Seconds that a command may take in a machine that runs."""


class Program:
    """A program that runs in a machine.

    Attributes:
        pid: its process id there.
        log: what it writes, in the machine's report.
    """

    def __init__(self, machine: Machine, pid: int, log: Path, pipe: Connection | None) -> None:
        self._machine = machine
        self._pipe = pipe
        self.pid = pid
        self.log = log

    @property
    def pipe(self) -> Connection:
        """To the program, which has its other end as the file descriptor ``{fd}``."""
        if self._pipe is None:
            raise RuntimeError("the program was started without a pipe")
        return self._pipe

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        self._machine.call("signal", self.pid, number)

    def stop(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit status; None: it runs."""
        status: int | None = self._machine.call("poll", self.pid)
        return status


def cables(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """The cards of two machines that are joined by this many cables; sockets in `folder`, whose path has to be short.

    A datagram socket has no side that has to be there first.
    """

    def end(cable: int, here: str, there: str) -> str:
        local, remote = (folder / f"{cable}{name}" for name in (here, there))
        return f"dgram,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"

    return [end(cable, "a", "b") for cable in range(count)], [end(cable, "b", "a") for cable in range(count)]


class Machine:
    """A machine that boots at once; `ready` waits for it.

    Args:
        image: what it is booted from.
        number: its own, from 1 on: its cards have the addresses ``10.77.CARD.NUMBER``.
        report: a folder of this host that it writes to, which is emptied before; its console goes to the file
            ``console``.
        cards: one for each of its cards: what qemu connects it to, as the arguments of ``-netdev`` without the id.
        memory: MiB.
        cores: of the machine.
    """

    def __init__(
        self,
        image: Image,
        number: int,
        report: Path,
        cards: Sequence[str] = ("hubport,hubid=1",),
        *,
        memory: int = 3072,
        cores: int = 2,
    ) -> None:
        shutil.rmtree(report, ignore_errors=True)
        report.mkdir(parents=True)
        self.number = number
        self.report = report
        self._listener = Listener(("127.0.0.1", 0))
        self._pipe: Connection | None = None
        self._logs = 0
        words = {
            "report": report,
            "tree": ROOT,
            "python": sys.executable,
            "port": self._listener.address[1],
            "number": number,
        }
        settings = [f"kvferry.{name}={value}" for name, value in words.items()]
        # The kernel's test of its timer fails on a busy host.
        kernel = ["console=ttyS0 panic=1 mitigations=off no_timer_check quiet net.ifnames=0", *settings]
        self._qmp_path = report / "qmp"
        command = [
            EMULATOR,
            *("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max", "-smp", str(cores), "-m", str(memory)),
            *("-display", "none", "-monitor", "none", "-serial", f"file:{report / 'console'}", "-no-reboot"),
            *("-qmp", f"unix:{self._qmp_path},server=on,wait=off", "-kernel", str(image.kernel)),
            *("-initrd", str(image.initrd)),
            *("-append", " ".join(kernel)),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={image.layer},mount_tag=layer,security_model=none,readonly=on"),
            *("-virtfs", f"local,path={report},mount_tag=report,security_model=none"),
            *("-netdev", "user,id=control", "-device", "virtio-net-pci,netdev=control,addr=0x10"),
        ]
        for card, connected in enumerate(cards):
            kind, _, arguments = connected.partition(",")
            address = f"52:54:00:77:{card:02x}:{number:02x}"
            command += ["-netdev", f"{kind},id=card{card}" + (f",{arguments}" if arguments else "")]
            command += ["-device", f"virtio-net-pci,id=nic{card},netdev=card{card},mac={address},addr={0x11 + card:#x}"]
        with (report / "qemu").open("wb") as said:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=said)

    def ready(self) -> Machine:
        """Wait until it takes commands. Idempotent."""
        if self._pipe is None:
            # The listener's own socket has no public name.
            listening: socket.socket = self._listener._listener._socket  # type: ignore[attr-defined]
            listening.settimeout(1.0)
            for _ in range(BOOT):
                with suppress(TimeoutError):
                    self._pipe = self._listener.accept()
                    return self
                if self._process.poll() is not None:
                    break
            raise RuntimeError(f"machine {self.number} did not boot: {self.console()}")
        return self

    def console(self) -> str:
        """What the machine's kernel and its first programs said, and qemu."""
        files = (self.report / name for name in ("qemu", "console"))
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def call(self, command: str, *arguments: Any, timeout: float = ANSWER) -> Any:
        """Ask the machine's `tests.support.machines.guest.Guest` something."""
        pipe = self.ready()._pipe
        assert pipe is not None
        pipe.send((command, arguments))
        if not pipe.poll(timeout):
            raise TimeoutError(f"machine {self.number} did not answer to {command}{arguments}")
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, *command: str) -> str:
        """Run a short program in it, and return what it wrote; raises `RuntimeError` where it failed."""
        wrote: str = self.call("run", list(command))
        return wrote

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, pipe: bool = False
    ) -> Program:
        """Start a program in it.

        Args:
            command: ``python`` stands for this interpreter; with a pipe, ``{fd}`` for the number of its end.
            environment: set for it.
            pipe: whether it has one.
        """
        self._logs += 1
        log = self.report / f"log{self._logs}"
        words = [sys.executable if word == "python" else word for word in command]
        with Listener(("127.0.0.1", 0)) as listener:
            port = listener.address[1] if pipe else None
            pid = self.call("start", words, str(log), dict(environment or {}), port)
            return Program(self, pid, log, listener.accept() if pipe else None)

    def pause(self) -> None:
        """Stop the whole machine, its clocks too."""
        self._monitor("stop")

    def resume(self) -> None:
        """Let a machine go on that was paused."""
        self._monitor("cont")

    def plug(self, card: int, *, connected: bool) -> None:
        """Pull a card's cable, or plug it in: the machine sees that."""
        self._monitor("set_link", name=f"nic{card}", up=connected)

    def close(self) -> None:
        """Switch it off. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._listener.close()

    def _monitor(self, command: str, **arguments: Any) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._qmp_path))
            with connection.makefile("rw") as file:
                file.readline()
                for request in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                    file.write(json.dumps(request) + "\n")
                    file.flush()
                    while "event" in (answer := json.loads(file.readline())):
                        pass
                    if "error" in answer:
                        raise RuntimeError(f"qemu's {command}: {answer['error']['desc']}")
