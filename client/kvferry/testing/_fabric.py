"""Everything that engines need of each other, in one process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import grpc

from kvferry import _arguments as arguments
from kvferry._client import Client
from kvferry._clock import now
from kvferry._forks import OneProcess
from kvferry._network import FABRICS, Network, add_fabric, remove_fabric
from kvferry._threads import start_thread
from kvferry._transport.agents import Agents
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._wire.channel import TlsConfig
from kvferry.errors import Closed, InvalidField, WrongState
from kvferry.planner.path_choice import Costs
from kvferry.planner.summed_blocks import IntegrityOptions
from kvferry.testing._channel import InProcessCall, InProcessChannel
from kvferry.testing._held import HeldReads
from kvferry.testing._home import InProcessHome
from kvferry.testing._memory import Process, Wire
from kvferry_server.domain.times import Times

T = TypeVar("T")

TIMES = Times()
_numbers = itertools.count(1)


class Fabric(OneProcess):
    """Runs a home in this process, and moves bytes between arrays of it: for the tests of engines.

    Clients of a fabric are real ones: planner, leases, ports and the home are those of production, and requests are
    encoded and decoded. Only gRPC's connections and NIXL are replaced. Neither NIXL nor the extra ``server`` has to be
    installed; no port is opened, and nothing is connected to. Memory is host memory.

    A fabric serves only the process that made it. Use it as a context manager, or close it.

    Threading: every method may be called from any thread.

    Args:
        ttl, max_ttl, engine_ttl, hold, final, max_wait: seconds, as the settings of ``kvferryd`` with these names.
            Short ones let a test wait for the end of a lease, or of a publication that nobody reads.

    Attributes:
        address: for clients that the code under test makes by itself: ``Client(fabric.address)``.

    Raises:
        InvalidField: a duration makes no sense, or `ttl` is above `max_ttl`.
        LimitReached: the system gives no thread.
    """

    def __init__(
        self,
        *,
        ttl: float = TIMES.ttl,
        max_ttl: float = TIMES.max_ttl,
        engine_ttl: float = TIMES.engine_ttl,
        hold: float = TIMES.hold,
        final: float = TIMES.final,
        max_wait: float = TIMES.max_wait,
    ) -> None:
        self._times = Times(ttl=ttl, max_ttl=max_ttl, engine_ttl=engine_ttl, hold=hold, final=final, max_wait=max_wait)
        self.address = f"{next(_numbers)}{FABRICS}"
        self._wire = Wire()
        self._lock = threading.Lock()
        self._members: dict[Network, _Member] = {}
        self._clients: list[Client] = []
        self._closed = False
        self._home: InProcessHome | None = None
        """Touched on the event loop only."""
        self._callbacks = ThreadPoolExecutor(1, "kvferry-fabric-callbacks")
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._run, "kvferry-fabric")
        self.start_home()
        add_fabric(self.address, self._join)

    def client(
        self,
        *,
        options: NixlOptions | None = None,
        staging: StagingOptions | None = None,
        integrity: IntegrityOptions | None = None,
        max_reads: int = 256,
    ) -> Client:
        """A client on this fabric, which closes it. Each stands for a process: `kill` ends one of them.

        Args:
            options, staging, integrity, max_reads: as of `kvferry.Client`.

        Raises:
            InvalidField: an argument is of another type.
            Closed: the fabric is closed.
        """
        self._check_open()
        made = Client(self.address, options=options, staging=staging, integrity=integrity, max_reads=max_reads)
        with self._lock:
            self._clients.append(made)
        return made

    def hold_reads(self) -> HeldReads:
        """Hold back the bytes of all reads that are posted from now on, until they are released.

        So a test decides how far a read is: it steps its engine while the bytes are under way, cancels in the middle,
        or lets the lease end.

        Returns:
            What is held back. Its end, as a context manager, releases everything.

        Raises:
            WrongState: reads are held back already.
        """
        self._check_open()
        held = HeldReads(lambda: self._wire.release(held))
        if not self._wire.hold(held):
            raise WrongState("reads are held back already: end that hold_reads() first")
        return held

    def fail_reads(self, count: int = 1) -> None:
        """Make the next reads fail as a broken connection does: they end with `TransferFailed`, and their blocks are
        uncertain until the agent that read them is gone.

        Args:
            count: chunks that fail, as `HeldReads` counts them; 0: none any more.

        Raises:
            InvalidField: it is negative.
        """
        self._wire.fail(arguments.integer("count", count, 0))

    def kill(self, client: Client) -> None:
        """End a client as the death of its process would: it says nothing more, its memory cannot be read any more, and
        what it was reading never arrives. Its home finds its engines dead after `engine_ttl`.

        The client is closed, so that its threads end.

        Raises:
            InvalidField: it is not a client of this fabric.
        """
        arguments.instance("client", client, Client, "a Client")
        with self._lock:
            member = self._members.get(client._network)
        if member is None:
            raise InvalidField("client", arguments.described(client), "a client of this fabric")
        member.kill()
        client.close()

    def stop_home(self) -> None:
        """Stop the home at once, as if its node server was killed: calls fail with `Unreachable`, and all that it knew
        is lost. Bytes go on moving. Idempotent."""
        self._check_open()
        self._await(self._stop_home())

    def start_home(self) -> None:
        """Start a home where the former one was stopped. Clients find it by themselves, within a second or two, and
        tell it again what they hold.

        Raises:
            WrongState: the home was not stopped.
        """
        self._check_open()
        self._await(self._start_home())

    def close(self) -> None:
        """Close the clients that `client` made, cut off all others, and end the home. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients = tuple(self._clients)
        remove_fabric(self.address)
        self._wire.release(None)
        for client in clients:
            client.close()
        with self._lock:
            members = tuple(self._members.values())
        for member in members:
            member.kill()
        self._await(self._stop_home())
        self._callbacks.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _join(self) -> Network:
        """The network of a new client."""
        member = _Member(self.address, self._wire, self._begin, self._callbacks)
        # Costs of copies within a process say nothing of a network's, and would differ from run to run.
        network = Network(member.dial, Agents(member.process), Costs())
        with self._lock:
            self._members[network] = member
        return network

    def _begin(self, call: InProcessCall) -> None:
        """Hand a call to the home."""
        try:
            self._loop.call_soon_threadsafe(self._serve, call)
        except RuntimeError:
            call.end(grpc.StatusCode.UNAVAILABLE, "the fabric is closed")

    def _serve(self, call: InProcessCall) -> None:
        """On the event loop."""
        home = self._home
        if home is None:
            call.end(grpc.StatusCode.UNAVAILABLE, "the home was stopped")
            return
        if call.done():
            return
        home.begin(call)
        timer = None
        if call.deadline is not None:
            late = partial(call.end, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            timer = self._loop.call_later(max(0.0, call.deadline - now()), late)

        def left() -> None:
            home.leave(call)
            if timer is not None:
                timer.cancel()

        call.at_end(lambda _: self._loop.call_soon_threadsafe(left))

    async def _start_home(self) -> None:
        if self._home is not None:
            raise WrongState("the home runs already: stop_home() first")
        self._home = InProcessHome(self.address, self._times)

    async def _stop_home(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            await home.stop()

    def _await(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the fabric is closed")


class _Member:
    """What one client has of a fabric. Thread-safe."""

    def __init__(
        self, address: str, wire: Wire, begin: Callable[[InProcessCall], None], callbacks: ThreadPoolExecutor
    ) -> None:
        self.process = Process(wire)
        self._address = address
        self._begin = begin
        self._callbacks = callbacks
        self._channels: list[InProcessChannel] = []

    def dial(self, address: str, tls: TlsConfig | None) -> InProcessChannel:
        """A channel to the home; calls on one to any other address fail."""
        channel = InProcessChannel(partial(self._hand_over, address), self._callbacks)
        self._channels.append(channel)
        return channel

    def kill(self) -> None:
        """Cut everything off."""
        self.process.killed = True
        for channel in tuple(self._channels):
            channel.cut()

    def _hand_over(self, address: str, call: InProcessCall) -> None:
        if address != self._address:
            call.end(grpc.StatusCode.UNAVAILABLE, f"the home of this fabric is {self._address}, and there is no other")
        elif self.process.killed:
            call.end(grpc.StatusCode.UNAVAILABLE, "the fabric has cut this client off")
        else:
            self._begin(call)
