"""The admin listener of a node server: what it is shown, and where it listens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvferry.errors import InvalidField
from kvferry_server.admin.call_counts import CallCounts
from kvferry_server.admin.limits import OVERDUE
from kvferry_server.admin.loop_lag import LoopLag
from kvferry_server.admin.node_state import ListenerLoad
from kvferry_server.domain.budgets import Budget
from kvferry_server.home.home import Home
from kvferry_server.node.certificates import Certificates
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.connections import count_connections
from kvferry_server.node.guard import Guard
from kvferry_server.node.listen import CannotListen, is_on_loopback
from kvferry_server.node.memory import memory_limit
from kvferry_server.node.serving import Serving
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker

if TYPE_CHECKING:
    from kvferry_server.admin.listener import AdminListener
    from kvferry_server.admin.service import AdminService

logger = logging.getLogger(__name__)


class ShownState:
    """The `NodeState` of a node server. Belongs to its event loop.

    Args:
        config: its settings.
        home, worker, relays: its parts.
        most_connections: how many connections each of its listeners may have.
        home_runs: whether the home's timers run.
        certificates: its TLS files; None: it has none.

    Attributes:
        listeners: its gRPC servers and their guards, as they come.
    """

    def __init__(
        self,
        config: NodeConfig,
        home: Home,
        worker: Worker,
        relays: Relays,
        most_connections: int,
        home_runs: Callable[[], bool],
        certificates: Certificates | None,
    ) -> None:
        self.home = home
        self.worker = worker
        self.calls = CallCounts(home.journal.events)
        self.lag = LoopLag()
        self.started_at = time.time()
        self.memory_limit = memory_limit()
        self.addresses: Sequence[str] = ()
        self.listeners: list[tuple[Serving, Guard]] = []
        self.failed_handshakes: Mapping[str, int] | None = None
        self._certificates = certificates
        self.settings: Mapping[str, object] = {
            **asdict(config.times),
            "drain": config.drain,
            "max_calls": config.max_calls,
            "max_streams": config.max_streams,
            "max_connections": most_connections,
        }
        self._relays = relays
        self._most_connections = most_connections
        self._home_runs = home_runs

    def why_not_ready(self) -> str:
        """Return why it takes no new work; empty if it does."""
        if self.home.draining:
            return "draining"
        if len(self.listeners) < len(self.addresses) or not self.addresses:
            return "starting"
        away = [str(serving.listener.address) for serving, _ in self.listeners if not serving.is_serving]
        return f"gRPC's server is being replaced at {' and '.join(away)}" if away else ""

    def why_not_healthy(self) -> str:
        """Return why only a restart helps; empty if it works. That it is asked at all shows that the loop runs."""
        if not self._home_runs():
            return "the home's timers have stopped: nothing is released any more"
        late = self.home.clock.now() - self.home.next_deadline()
        return f"the home's timers are {late:.0f} s late" if late > OVERDUE else ""

    def loads(self) -> Sequence[ListenerLoad]:
        """Return what its listeners carry."""
        return [self._load(serving, guard) for serving, guard in tuple(self.listeners)]

    def relayed_homes(self) -> int:
        """Return how many homes it is connected to as a relay."""
        return self._relays.num_homes

    def answers(self) -> Sequence[Budget]:
        """Return the budgets of answers that wait to be taken."""
        return [guard.answers for _, guard in self.listeners]

    def requests(self) -> Sequence[Budget]:
        """Return the budgets of decoded requests."""
        return [guard.requests.memory for _, guard in self.listeners]

    def certificate_expiry(self) -> float | None:
        """Return when its certificate ends, in seconds since 1970; None: it has none."""
        return None if self._certificates is None else self._certificates.expiry

    def handshakes(self) -> int | None:
        """Return how many TLS handshakes have begun; None: it has no TLS."""
        return None if self._certificates is None else self._certificates.handshakes

    def authorities_expiry(self) -> float | None:
        """Return when the first of the authorities ends that clients are checked against, in seconds since 1970; None:
        there are none."""
        return None if self._certificates is None else self._certificates.authorities_expiry

    def _load(self, serving: Serving, guard: Guard) -> ListenerLoad:
        address = serving.listener.address
        calls, streams = guard.calls, guard.streams
        return ListenerLoad(
            "unix" if address.is_unix else "tcp",
            calls.used,
            calls.capacity,
            streams.used,
            streams.capacity,
            count_connections(address),
            self._most_connections,
        )


class AdminServing:
    """The admin listener of a node server.

    Args:
        config: its settings; `admin_address` is set.
        state: what is shown.
    """

    def __init__(self, config: NodeConfig, state: ShownState) -> None:
        self._config = config
        self._state = state
        self._service: AdminService | None = None
        self._listener: AdminListener | None = None

    async def start(self) -> str:
        """Listen. Returns the address; empty if it is the default one and in use.

        Raises:
            InvalidField: the address is beyond loopback, and that was not allowed.
            CannotListen: the address was set and cannot be had.
        """
        # Imported here, because a node server without this listener needs neither package.
        from kvferry_server.admin.listener import AdminListener
        from kvferry_server.admin.service import AdminService

        address = self._config.admin_address
        if address is None:
            return ""
        local = is_on_loopback(address)
        if not local and not self._config.admin_insecure:
            raise InvalidField(
                "admin",
                str(address),
                "an address on loopback: whoever can connect sees the names of engines, requests and hosts. If that is "
                "meant, allow it with --admin-insecure",
            )
        self._service = AdminService(self._state, local=local)
        listener = AdminListener(address, self._service.answer)
        try:
            await listener.start()
        except OSError as error:
            if "admin" in self._config.model_fields_set:
                raise CannotListen(address, f"{error.strerror or error} (setting admin)") from None
            logger.warning("no metrics and no page: %s is in use, so set another address with --admin", address)
            return ""
        self._listener = listener
        return str(listener.address)

    async def close(self) -> None:
        """Stop to listen. Idempotent."""
        if self._listener is not None:
            await self._listener.close()
        if self._service is not None:
            self._service.close()
