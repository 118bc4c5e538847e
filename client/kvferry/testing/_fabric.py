"""The fabric: homes, and NIXL's part of moving bytes, in one process."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial
from typing import cast

import grpc

from kvferry import _arguments as arguments
from kvferry._client import Client
from kvferry._clock import now
from kvferry._forks import Closing
from kvferry._integrity.summed_blocks import IntegrityOptions
from kvferry._loop import Loop
from kvferry._network import FABRICS, Network, fabrics
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry.aio import AsyncClient
from kvferry.errors import Closed, InvalidField, WrongState
from kvferry.planner.path_choice import Costs
from kvferry.testing._home import InProcessAioChannel, InProcessCall, InProcessChannel, InProcessHome
from kvferry.testing._memory import HeldReads, Process, Wire
from kvferry_server.domain.times import Times

TIMES = Times()
STEPS_OF_TTL = 24
"""Steps of `Fabric.advance` per ttl: renewals, of which there are three per ttl, keep leases alive."""

COSTS = Costs(descriptor=0.0)
"""Costs measured within one process would not be those of a network, and would differ from run to run. With these, no
read is staged unless a client says so: after a cancel, blocks are uncertain until their bytes have arrived."""

HANDED_OVER = 4
"""Turns of the event loops per step, so that calls that are due are made, answered and handled."""

_numbers = itertools.count(1)


class Fabric(Closing):
    """Runs homes in this process, and moves bytes between arrays of this process, for the tests of engines.

    The clients of a fabric are real: the planner, the leases, the ports and the home are those of production, and
    requests are encoded and decoded. The fabric replaces only gRPC's connections and NIXL. Neither NIXL nor the extra
    ``server`` must be installed, and the fabric opens no port. It supports host memory only.

    A fabric serves only the process that made it. Use it as a context manager, or close it.

    Threading: every method may be called from any thread.

    Args:
        homes: number of homes. Each stands for the node server of another node.
        ttl, max_ttl, engine_ttl, hold, final, max_wait: seconds; see the settings of ``kvferryd`` with these names.
            With short ones a test can wait for the end of a lease, or of an unread publication.

    Attributes:
        address: the address for clients that the code under test makes: ``Client(fabric.address)``.
        addresses: the addresses of all homes, of which `address` is the first. A client's ``allowed_homes``, where it
            reads from engines with another home.

    Raises:
        InvalidField: there is no home, a duration is out of range, or `ttl` is above `max_ttl`.
        LimitReached: the system refused another thread.
    """

    def __init__(
        self,
        *,
        homes: int = 1,
        ttl: float = TIMES.ttl,
        max_ttl: float = TIMES.max_ttl,
        engine_ttl: float = TIMES.engine_ttl,
        hold: float = TIMES.hold,
        final: float = TIMES.final,
        max_wait: float = TIMES.max_wait,
    ) -> None:
        self._times = Times(ttl=ttl, max_ttl=max_ttl, engine_ttl=engine_ttl, hold=hold, final=final, max_wait=max_wait)
        self.addresses = tuple(f"{next(_numbers)}{FABRICS}" for _ in range(arguments.integer("homes", homes, 1)))
        self.address = self.addresses[0]
        self._wire = Wire()
        # Any thread adds to these collections, in single steps, and copies them before it iterates.
        self._processes: list[Process] = []
        self._clients: list[Client] = []
        self._closed = False
        self._homes: dict[str, InProcessHome] = {}
        """The homes that run, by address. Used only on the event loop."""
        self._added = 0.0
        """Seconds that the test has added to this host's time."""
        self._loop = Loop("kvferry-fabric", lambda: now() + self._added)
        self._loops = [self._loop]
        """The loops of the homes and the clients."""
        for number, address in enumerate(self.addresses):
            self.start_home(number)
            fabrics[address] = self._join

    def client(
        self,
        *,
        home: int = 0,
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        prompt_check: str = "compare",
        optimistic: bool = True,
    ) -> Client:
        """Make a client on this fabric. The fabric closes it.

        Each client stands for a process of its own; `kill` simulates the death of that process.

        Args:
            home: number of the client's own node server. It may read from engines of all homes.
            options, staging, integrity, prompt_check, optimistic: see `kvferry.Client`.

        Raises:
            InvalidField: an argument has the wrong type, or there is no such home.
            Closed: the fabric is closed.
        """
        made = Client(
            self._address_of(home),
            allowed_homes=self.addresses,
            options=options,
            staging=staging,
            integrity=integrity,
            prompt_check=prompt_check,
            optimistic=optimistic,
        )
        self._clients.append(made)
        return made

    def hold_reads(self) -> HeldReads:
        """Hold back the bytes of all reads that are posted from now on, until they are released.

        A test can then step its engine while bytes are in transit, cancel a read halfway, or let its lease end.

        Returns:
            The reads that are held back; as a context manager, it releases all of them at the end.

        Raises:
            WrongState: another `hold_reads` is still holding reads back.
        """
        self._check_open()
        return HeldReads(self._wire)

    def fail_reads(self, count: int = 1) -> None:
        """Make the next reads fail as if a connection broke.

        These reads end with `TransferFailed`, and their blocks are uncertain until the reading agent is destroyed.

        Args:
            count: number of chunks that fail (see `HeldReads`); 0: no more chunks fail.

        Raises:
            InvalidField: `count` is negative.
        """
        count = arguments.integer("count", count, 0)
        with self._wire.changed:
            self._wire.to_fail = count

    def kill(self, client: Client | AsyncClient) -> None:
        """Simulate the death of a client's process, and close the client.

        The client sends nothing more, its memory can no longer be read, and the bytes that it was reading never arrive.
        The home considers its engines dead after `engine_ttl`.

        Raises:
            InvalidField: the argument is not a client of this fabric.
        """
        sync = client.sync if isinstance(client, AsyncClient) else client
        arguments.instance("client", sync, Client, "a Client or an AsyncClient")
        process = sync._network.binding
        if process not in self._processes:
            raise InvalidField("client", arguments.described(client), "a client of this fabric")
        process.kill()
        sync.close()

    def advance(self, seconds: float) -> None:
        """Let time pass for the homes and all clients of the fabric, at once: leases are renewed or end, holds and
        timeouts run out. The time that moving bytes takes is not shortened.

        A single step of the code under test does not take longer: time passes between its steps.

        Raises:
            InvalidField: `seconds` is negative.
        """
        self._check_open()
        left = arguments.seconds("seconds", seconds, zero=True)
        while left > 0:
            step = min(left, self._times.ttl / STEPS_OF_TTL)
            left -= step
            self._added += step
            for _ in range(HANDED_OVER):
                for loop in tuple(self._loops):
                    if loop.started:
                        # A client may be closed meanwhile.
                        with suppress(Closed):
                            loop.run(asyncio.sleep(0))

    def wait_until_waiting(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until exactly `count` reads wait at the homes for a publication under a router's key (see
        `kvferry.router_reference`).

        A test can then publish after its reader has asked, end the wait, or check that the wait has ended.

        Args:
            count: number of calls that wait; each rank of an engine without a scheduler makes one.
            timeout: seconds to wait.

        Raises:
            TimeoutError: another number of reads waits after the timeout.
            InvalidField: `count` is negative.
        """
        self._check_open()
        self._loop.run(self._until_waiting(arguments.integer("count", count, 0), arguments.seconds("timeout", timeout)))

    def stop_home(self, home: int = 0) -> None:
        """Stop a home at once, as if its node server was killed. Idempotent.

        Calls fail with `Unreachable`, and the home's records are lost. Reads that were posted continue.

        Raises:
            InvalidField: there is no such home.
        """
        self._loop.run(self._stop_home(self._address_of(home)))

    def start_home(self, home: int = 0) -> None:
        """Start a home again after `stop_home`.

        Clients reconnect within a second or two, and send their records again.

        Raises:
            WrongState: the home was not stopped.
            InvalidField: there is no such home.
        """
        self._loop.run(self._start_home(self._address_of(home)))

    def close(self) -> None:
        """Close the clients that `client` made, disconnect all others, and stop the homes. Idempotent."""
        if fabrics.pop(self.address, None) is None:
            return
        for address in self.addresses[1:]:
            del fabrics[address]
        self._closed = True
        held = self._wire.held
        if held is not None:
            held.close()
        for client in tuple(self._clients):
            client.close()
        for process in tuple(self._processes):
            process.kill()
        for address in self.addresses:
            self._loop.run(self._stop_home(address))
        self._loop.close()

    def _address_of(self, home: int) -> str:
        self._check_open()
        return self.addresses[arguments.integer("home", home, 0, len(self.addresses) - 1)]

    def _join(self) -> Network:
        """Make the network of a new client."""
        process = Process(self._wire)

        def dial(address: str, _: object) -> grpc.Channel:
            channel = InProcessChannel(partial(self._begin, address, process), self._loop.now)
            process.channels.append(channel)
            return cast(grpc.Channel, channel)

        self._processes.append(process)
        return Network(dial, process, COSTS, self._loop.now, self._loops.append)

    def _dial(self, address: str, _: object) -> grpc.aio.Channel:
        """Make a channel from one home to another."""
        return cast(grpc.aio.Channel, InProcessAioChannel(partial(self._begin, address, None), self._loop.now))

    def _begin(self, address: str, caller: Process | None, call: InProcessCall) -> None:
        """Hand a call of a client or, without `caller`, of a home to a home. May be called on any thread."""
        if caller is not None and caller.killed:
            call.end(grpc.StatusCode.UNAVAILABLE, "the fabric has disconnected this client")
        elif not self._loop.call(partial(self._serve, address, call)):
            call.end(grpc.StatusCode.UNAVAILABLE, "the fabric is closed")

    def _serve(self, address: str, call: InProcessCall) -> None:
        """Let a home answer a call. Runs on the event loop."""
        home = self._homes.get(address)
        if home is None:
            known = "the home was stopped" if address in self.addresses else f"this fabric has no home {address}"
            call.end(grpc.StatusCode.UNAVAILABLE, known)
        elif not call.done():
            home.begin(call)

    async def _start_home(self, address: str) -> None:
        if address in self._homes:
            raise WrongState("the home runs already: stop_home() first")
        self._homes[address] = InProcessHome(address, self._times, self._loop, self._dial)

    async def _stop_home(self, address: str) -> None:
        home = self._homes.pop(address, None)
        if home is not None:
            await home.stop()

    async def _until_waiting(self, count: int, timeout: float) -> None:
        until = self._loop.now() + timeout
        while (waiting := sum(home.waiting for home in self._homes.values())) != count:
            if self._loop.now() >= until:
                raise TimeoutError(f"{waiting} reads wait after {timeout:g} s, and {count} were expected")
            await asyncio.sleep(0.001)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fabric is closed")
