"""systemd's protocol for units of `Type=notify`, by which kvferryd reports its state.

Written here because a report is one datagram: systemd's own binding needs a compiler and systemd's headers, and the
pure-Python packages are not maintained.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from kvferry_server.node.times import DRAIN_STREAMS, STOP_MARGIN

SOCKET = "NOTIFY_SOCKET"

logger = logging.getLogger(__name__)


class ServiceManager:
    """Reports the state of this process to systemd, if the environment names a socket (`NOTIFY_SOCKET`).

    Never raises and never waits: a service manager that is gone or busy is no reason to stop serving.
    """

    def __init__(self) -> None:
        path = os.environ.get(SOCKET, "")
        # "@" stands for the zero byte that begins names in Linux's abstract namespace.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path

    def ready(self, status: str) -> None:
        """Report that the server serves: units that wait for it may start. `systemctl status` shows `status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report that settings are read again, until `ready`."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self, drain: float) -> None:
        """Report that a drain of at most `drain` seconds has begun, and ask for as much time as the stop may take, so
        that systemd does not kill the process earlier."""
        longest = drain + DRAIN_STREAMS + STOP_MARGIN
        self._tell("STOPPING=1", f"STATUS=draining for at most {drain:g} s", f"EXTEND_TIMEOUT_USEC={longest * 1e6:.0f}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
                manager.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("could not notify the service manager of %s: %s", lines[0], error)
