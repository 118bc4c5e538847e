"""What kvferryd tells the service manager that started it: systemd's protocol for units of `Type=notify`.

Written here because it is one datagram: systemd's own binding needs a compiler and its headers, and the pure packages
for it are not kept up.
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
    """Tells systemd the state of this process; nothing, if the environment names no socket (`NOTIFY_SOCKET`).

    Never raises and never waits: a service manager that is gone or busy is no reason to stop serving.
    """

    def __init__(self) -> None:
        path = os.environ.get(SOCKET, "")
        # In Linux's abstract namespace, whose names begin with a zero byte, written as "@".
        self._address = f"\0{path[1:]}" if path.startswith("@") else path

    def ready(self, status: str) -> None:
        """Say that the server serves, and what `systemctl status` shows; what waits for the unit may start."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that settings are read again; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self, drain: float) -> None:
        """Say that a drain has begun, with `drain` seconds for live leases and calls in progress, and ask for the time
        that it may take, so that systemd does not kill it earlier."""
        longest = drain + DRAIN_STREAMS + STOP_MARGIN
        self._tell("STOPPING=1", f"STATUS=draining for at most {drain:g} s", f"EXTEND_TIMEOUT_USEC={longest * 1e6:.0f}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
                manager.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager could not be told %s: %s", lines[0], error)
