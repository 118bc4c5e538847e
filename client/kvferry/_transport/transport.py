"""The transport of one destination rank: makes transfers, and hands them to reading threads. Each thread is made when
it is needed, and another one after it was retired.

Threading: everything may be called from any thread. Only `Transport.prepare` and `close` wait, and nothing waits for
NIXL (R11), which only the threads of `kvferry._transport.reading_thread` call.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._memory.access import StagingSpace
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport.bounds import RegionMap, check_agent, check_descriptors
from kvferry._transport.nixl_agent import AgentInfo, MakeReadingAgent, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import LinkState
from kvferry._transport.reading_thread import Message, ReadingThread
from kvferry._transport.staging_pool import StagedWork, StagingOptions, StagingPool
from kvferry._transport.transfer import PeerWork, Transfer, TransferState, as_kvferry_error
from kvferry.errors import Closed, InvalidField
from kvferry.geometry.plane import MemoryKind
from kvferry.planner.expansion import SourceDescriptors, StagedRead
from kvferry.stats import TransportGauges

__all__ = ["Transfer", "TransferPart", "TransferState", "Transport"]

logger = Log(__name__)

SHARED_READ = 8 << 20
"""Bytes read from one peer from which several threads share the read, where posts copy."""

PEERS_KEPT = 1024
"""Peers whose check is remembered. Their metadata never change, and reads come from few peers at a time."""

TransferPart: TypeAlias = tuple[AgentInfo, SourceDescriptors]
"""The reads of a transfer from one source rank, and that rank's agent."""


class Transport:
    """Reads into one destination rank's memory. Its agents are made by `reading` when needed, each with its thread.

    Unmapping `memory` while a read is not quiet crashes the process. So the threads reference the transport, and with
    it the memory, for as long as an agent may write to it. Deadlines are on `clock`, which is monotonic.

    Attributes:
        places: the threads that get new work; None where no thread was needed so far.
        living: all threads that have not ended, retired ones included.
    """

    def __init__(
        self,
        memory: RankMemory,
        options: NixlOptions | None = None,
        *,
        reading: MakeReadingAgent = ReadingAgent,
        staging: StagingOptions | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        self._memory = memory
        self._options = options or NixlOptions()
        self._reading = reading
        self._map = RegionMap("this rank", memory.regions)
        self._staging = staging or StagingOptions()
        self._pools: dict[tuple[MemoryKind, int], StagingPool] = {}
        self._making_pool = threading.Lock()
        """Held while staging memory is made, which may wait for a device. Nothing else may wait for that: an engine's
        step that cancels a read takes the other lock."""
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        """No other thread is made. Set with the lock held."""
        self.places: list[ReadingThread | None] = [None] * self._options.most_reading_agents
        self._spread = self._options.reading_agents or 1
        """Threads over which peers are spread. The other threads only take part in large reads."""
        self.living: set[ReadingThread] = set()
        self._moved_before = 0
        self._agents_retired = 0
        self._peers: dict[str, tuple[AgentInfo, RegionMap]] = {}
        """The last checked peers, by name, with their readable regions."""
        self._transfers: set[Transfer] = set()
        self._uncertain: set[Transfer] = set()
        self._quiesced = self._quarantined_bytes = 0

    def start(
        self,
        parts: Sequence[TransferPart],
        *,
        deadline: float | None,
        label: str,
        spaces: Sequence[StagingSpace] = (),
    ) -> Transfer:
        """Start to read. Returns at once.

        An empty read is DONE at once. Bytes count until `deadline`; None: without a limit. `label` names the transfer
        in errors and logs. `spaces` is staging memory that the descriptors read into, beside the rank's own memory.

        Raises:
            InvalidField: a descriptor lies outside of the memory registered here, or of its peer's announced memory.
            BadAgentMetadata: a peer's metadata are not the announced ones.
            Closed: the transport was closed.

        If this raises, nothing was posted, and nothing will be. Every other error becomes the transfer's `error`, for
        example that there is no staging memory or no thread.
        """
        infos: dict[str, AgentInfo] = {}
        local = self._map
        if spaces:
            local = RegionMap("this rank", (*local.regions, *(space.region for space in spaces)))
        for peer, part in parts:
            info = infos.setdefault(peer.name, peer)
            if info is not peer and info != peer:
                raise InvalidField("parts", info.name, "one agent of a name")
            remote = self._checked(info)
            for some in part.descriptors:
                check_descriptors(some, local, remote)
        size = sum(part.total_bytes for _, part in parts)
        transfer = Transfer(label, size, deadline, self._clock, self._wake)
        with self._lock:
            if self._closed:
                raise Closed("the transport was closed")
            if not transfer.state.final:
                self._transfers.add(transfer)
        transfer.add_quiet_callback(self._forget)
        transfer.add_done_callback(self._ended)
        try:
            for peer, part in parts:
                self._submit_part(transfer, peer, part, spaces)
        except Exception as error:
            # Earlier parts may be read already: from here on only the transfer knows what is quiet.
            transfer.fail(as_kvferry_error(error, f"the start of transfer {label!r}"))
        return transfer

    def pool(self, kind: MemoryKind, device: int) -> StagingPool:
        """The staging memory of an address space; made when first needed. Raises `InvalidField` if no tensor of this
        device is known."""
        with self._making_pool:
            pool = self._pools.get((kind, device))
            if pool is None:
                options, memory = self._staging, self._memory.at(kind, device)
                if memory is None:
                    expected = f"one that a registered tensor lies on: {sorted(self._memory.devices)}"
                    raise InvalidField("device", device, expected)
                space = memory.allocate(options.slot_bytes * options.slots)
                pool = StagingPool(space, options.slot_bytes, self._wake)
                with self._lock:
                    self._pools[kind, device] = pool
            return pool

    def warm(self, peer: AgentInfo) -> None:
        """Connect to a peer ahead of the first read. Returns at once; a failed connection shows in the read. Raises
        `BadAgentMetadata` and `Closed` as `start`."""
        self._checked(peer)
        self._send(peer.name, peer)

    def prepare(self, timeout: float = 0.0) -> None:
        """Make the reading agents ahead of the first read: importing NIXL and making an agent take most of a second.

        Waits `timeout` seconds for the agents; 0: returns at once. Raises `NixlError` or `NixlMissing` if they could
        not be made in time, and `Closed`.
        """
        threads = [self._thread_at(place) for place in range(self._spread)]
        until = self._clock() + timeout
        for thread in threads if timeout else ():
            thread.wait_made(max(0.0, until - self._clock()))

    def retire(self, peer_name: str) -> None:
        """Drop a peer as soon as all reads from it have ended and are quiet. The next read adds it again."""
        with self._lock:
            self._peers.pop(peer_name, None)
        for thread in self._all_threads():
            thread.send(peer_name)

    def thread_of(self, peer_name: str) -> ReadingThread:
        """The thread that reads from a peer; a new thread if the last was retired. Raises `Closed`."""
        return self._thread_at(self._place_of(peer_name))

    def gauges(self) -> TransportGauges:
        with self._lock:
            transfers, pools, threads = tuple(self._transfers), tuple(self._pools.values()), tuple(self.living)
            quiesced, quarantined = self._quiesced, self._quarantined_bytes
            moved, retired = self._moved_before, self._agents_retired
        ended = [transfer for transfer in transfers if transfer.state.final]
        # A quiet transfer may be among them for a moment, until its callbacks run.
        uncertain = [transfer for transfer in ended if not transfer.quiet]
        return TransportGauges(
            transfers=len(transfers) - len(ended),
            uncertain=len(uncertain),
            quiesced=quiesced,
            bytes_moved=moved + sum(thread.moved for thread in threads),
            chunks_in_flight=sum(thread.chunks_in_flight for thread in threads),
            staging_slots=sum(pool.in_use for pool in pools),
            agents=len(threads),
            retired_agents=sum(thread.retired for thread in threads),
            peers=sum(thread.peer_count for thread in threads),
            uncertain_bytes=sum(transfer.bytes_total for transfer in uncertain),
            quarantined_bytes=quarantined,
            agents_retired=retired,
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Cancel the transfers that have not ended, and end the agents once all is quiet. Idempotent.

        Waits at most `timeout` seconds; returns whether all is quiet and every agent has ended. An agent with a stuck
        read is destroyed in the background, when the fence time is over: destroying an agent while it reads can kill
        its source.
        """
        until = self._clock() + timeout
        with self._lock:
            self._closed = True
            transfers = tuple(self._transfers)
        for transfer in transfers:
            transfer.cancel()
        threads = self._all_threads()
        for thread in threads:
            thread.close()
        ended = [thread.join(max(0.0, until - self._clock())) for thread in threads]
        return all(ended)

    def _checked(self, peer: AgentInfo) -> RegionMap:
        """A peer's readable regions; raises `BadAgentMetadata` if its metadata are not the announced ones."""
        known = self._peers.get(peer.name)
        if known is not None and known[0] is peer:
            return known[1]
        check_agent(peer)
        regions = RegionMap(f"agent {peer.name!r}", peer.regions)
        with self._lock:
            self._peers[peer.name] = peer, regions
            if len(self._peers) > PEERS_KEPT:
                del self._peers[next(iter(self._peers))]
        return regions

    def _submit_part(
        self, transfer: Transfer, peer: AgentInfo, part: SourceDescriptors, spaces: Sequence[StagingSpace]
    ) -> None:
        size = sum(some.total_bytes for some in part.descriptors)
        if size:
            home = self.places[self._place_of(peer.name)]
            link = None if home is None else home.link_to(peer)
            copies = link is not None and link.copies
            helpers = self._helpers(peer) if copies and size >= SHARED_READ else []
            shared = 1 + len(helpers)
            work = PeerWork(transfer, peer, part.descriptors, self._clock(), spaces, copies=copies, threads=shared)
            self._submit(work)
            for helper in helpers:
                # If the helper is closed or retired by now, the others read its part.
                helper.send(work)
        by_space: dict[tuple[MemoryKind, int], list[StagedRead]] = {}
        for staged in part.staged:
            by_space.setdefault(staged.lane.memory.destination, []).append(staged)
        for space, reads in by_space.items():
            self._submit(StagedWork(transfer, peer, reads, self.pool(*space), self._clock()))

    def _ended(self, transfer: Transfer) -> None:
        with self._lock:
            if not transfer.quiet:
                self._uncertain.add(transfer)
                self._quarantined_bytes += transfer.bytes_total

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._transfers.discard(transfer)
            if transfer in self._uncertain:
                self._uncertain.discard(transfer)
                self._quiesced += 1

    def _submit(self, work: PeerWork) -> None:
        """Hand work to the thread that reads from its peer. If there is no such thread, the work fails and nothing is
        raised: a retired thread hands on its unposted work here, and must go on."""
        try:
            self._send(work.info.name, work)
        except Exception as error:
            work.owner.fail(as_kvferry_error(error, f"the start of transfer {work.owner.label!r}"))

    def _send(self, peer_name: str, message: Message) -> None:
        while not self.thread_of(peer_name).send(message):
            pass

    def _wake(self) -> None:
        for thread in self._all_threads():
            thread.wake()

    def _all_threads(self) -> tuple[ReadingThread, ...]:
        with self._lock:
            return tuple(self.living)

    def _place_of(self, peer_name: str) -> int:
        return zlib.crc32(peer_name.encode()) % self._spread

    def _thread_at(self, place: int) -> ReadingThread:
        with self._lock:
            thread = self.places[place]
            if thread is None or not thread.accepting:
                if self._closed:
                    raise Closed("the transport was closed")
                name = f"kvferry/{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(6)}/reading"
                thread = ReadingThread(
                    name,
                    self._options,
                    self._clock,
                    may_retire=self._may_retire,
                    moved_on=self._submit,
                    gone=self._gone,
                    make=partial(self._reading, name, self._memory.regions, self._options),
                )
                self.places[place] = thread
                self.living.add(thread)
            return thread

    def _helpers(self, peer: AgentInfo) -> list[ReadingThread]:
        """The other threads that take part in a large read from a peer: those connected to the peer. The rest connect
        meanwhile, for the next read."""
        home = self._place_of(peer.name)
        ready = []
        for place, known in enumerate(self.places):
            # Where no agent could be made, another attempt takes long, and is not worth it for each large read.
            if place == home or (known is not None and known.refusal is not None):
                continue
            try:
                helper = self._thread_at(place)
            except Exception as error:
                # Reads go on without it.
                logger.info("large reads are not shared with another thread: %r", error)
                continue
            link = helper.link_to(peer)
            if link is not None and link.state is LinkState.READY:
                ready.append(helper)
            else:
                helper.send(peer)
        return ready

    def _may_retire(self) -> bool:
        with self._lock:
            may = sum(thread.retired for thread in self.living) < self._options.retired_agents
            self._agents_retired += may
            return may

    def _gone(self, thread: ReadingThread, quiet: bool) -> None:
        # First the reason, then the gauge that shows it.
        if not quiet:
            logger.error("reading agent %s could not be destroyed", thread.name)
        with self._lock:
            self.living.discard(thread)
            self._moved_before += thread.moved
