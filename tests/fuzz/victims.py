"""A source and a destination that work normally, over real NIXL, and notice all harm.

The source overwrites published blocks as soon as they are released, as an engine that reuses its blocks. A round keeps
two reads open from its beginning to its end, so that all calls in between come under their leases.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import grpc
import numpy as np

from kvferry import Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion, Publication, Release
from kvferry._cache import Cache
from kvferry._clock import now
from kvferry._reads.cache_reads import Read
from kvferry._wire.reference import parse_reference
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.caches import POISON, Model
from tests.support.identifiers import unique_id

MODEL = Model(layers=2, heads=4, head_dim=16, num_blocks=128)
BLOCKS = 8
"""Blocks of one step of a request."""
OPEN = 2
"""Reads open at the same time."""
SOON = 30.0
"""Timeout in seconds; even a busy machine takes far less."""

Content = dict[tuple[int, str], np.ndarray]


class Harmed(AssertionError):
    """A peer has harmed a victim."""


@dataclass(eq=False)
class Offered:
    """A published request: its blocks and their content."""

    publication: Publication
    ids: list[int]
    content: Content
    release: Release | None = None


class _Side:
    """One engine of one rank, in this process."""

    def __init__(self, address: str, name: str, *, serve: bool) -> None:
        self.cells = np.full(MODEL.rank_bytes(Interval(0, MODEL.heads)), POISON, np.uint8)
        self.client = Client(address)
        base = self.cells.ctypes.data
        self.cache: Cache = self.client.register_cache(
            EngineSpec(unique_id(name), (MODEL.group(),), 1, {"model": "tiny"}),
            planes=MODEL.planes(Interval(0, MODEL.heads), base),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, base, len(self.cells))],
            keep=self.cells,
            serve=serve,
        )
        self.free = list(range(MODEL.num_blocks))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def plane(self, layer: int, component: str) -> np.ndarray:
        """``uint8[blocks, heads, tokens, state_bytes]``."""
        size, count = MODEL.plane_bytes(component, Interval(0, MODEL.heads)), len(MODEL.components)
        begin = (layer * count + MODEL.components.index(component)) * size
        shape = (MODEL.num_blocks, MODEL.heads, MODEL.block_tokens, MODEL.state_bytes(component))
        return self.cells[begin : begin + size].reshape(shape)


class Victims:
    """The source and the destination. `begin` and `finish` a round; `finish` notices any harm in between."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.source = _Side(address, "victim-source", serve=True)
        self.destination = _Side(address, "victim-destination", serve=False)
        self.session = self.source.cache.session
        self.rounds = 0
        self._random = np.random.default_rng(5)
        self._numbers = itertools.count()
        self._pinned: dict[int, Offered] = {}
        self._keys: set[bytes] = set()
        self._open: list[tuple[Offered, Read, list[int]]] = []

    def secrets(self) -> set[bytes]:
        """Return the secrets that no peer may ever receive."""
        tokens = self.session.token, self.destination.cache.session.token
        return self._keys | {token.session_secret for token in tokens}

    def begin(self) -> None:
        """Publish halves of requests and begin to read them; the reads have leases on return."""
        for _ in range(OPEN):
            offered = self._publish(last=False)
            ids = self.destination.take(2 * BLOCKS)
            blocks = {"full": Blocks(ids)}
            read = self.destination.cache.read(offered.publication.reference, blocks, timeout=SOON)
            self._open.append((offered, read, ids))
        until = now() + SOON
        while self._leases() < OPEN:
            if now() > until:
                raise Harmed(f"reads got no lease in {SOON} s")
            time.sleep(0.005)

    def finish(self, *, restarted: bool = False) -> None:
        """Publish the rest, and check all bytes and releases.

        Args:
            restarted: the home was restarted in between. The read may then have failed; it is made again.

        Raises:
            Harmed: bytes are wrong, a read is lost, a release came early, twice or not at all.
        """
        opened, self._open = self._open, []
        self._check_pinned([offered for offered, _, _ in opened])
        for offered, _, _ in opened:
            self._publish_more(offered)
        for offered, read, ids in opened:
            self._ended(offered, read, ids, may_fail=restarted)
        again = self._publish(last=True)
        ids = self.destination.take(BLOCKS)
        blocks = {"full": Blocks(ids)}
        read = self.destination.cache.read(again.publication.reference, blocks, timeout=SOON)
        self._ended(again, read, ids, may_fail=False)
        for offered in (*(offered for offered, _, _ in opened), again):
            self._released(offered)
        self.rounds += 1

    def close(self) -> None:
        """Close both clients."""
        self.destination.client.close()
        self.source.client.close()

    # Helpers.

    def _leases(self) -> int:
        """Return the number of live leases on the source, from a public listing."""
        incarnation = self.session.token.incarnation
        with grpc.insecure_channel(self._address) as channel:
            listed = (
                IntrospectionStub(channel).ListEngines(ipb.ListEnginesRequest(page_size=1000), timeout=SOON).engines
            )
        return sum(summary.leases for summary in listed if summary.engine.incarnation == incarnation)

    def _publish(self, *, last: bool) -> Offered:
        ids = self.source.take(BLOCKS)
        content = self._write(ids)
        name = f"request-{next(self._numbers)}"
        try:
            publication = self.session.publish(name, {"full": Blocks(ids)}, last=last, timeout=SOON)
        except KvferryError as error:
            raise Harmed(f"{name} cannot be published any more: {error!r}") from error
        self._keys.add(parse_reference(publication.reference).key)
        offered = self._pinned[publication.number] = Offered(publication, ids, content)
        return offered

    def _publish_more(self, offered: Offered) -> None:
        ids = self.source.take(BLOCKS)
        more = self._write(ids)
        first = BLOCKS * MODEL.block_tokens
        try:
            self.session.publish_more(
                offered.publication, {"full": Blocks(ids, first_token=first)}, last=True, timeout=SOON
            )
        except KvferryError as error:
            raise Harmed(f"{offered.publication.request_id} cannot be completed: {error!r}") from error
        offered.ids += ids
        offered.content = {key: np.concatenate((values, more[key])) for key, values in offered.content.items()}

    def _ended(self, offered: Offered, read: Read, ids: list[int], *, may_fail: bool) -> None:
        name = offered.publication.request_id
        error = read.exception(SOON)
        if error is not None and not may_fail:
            raise Harmed(f"the read of {name} failed: {error!r}") from error
        if error is None:
            # Before the bytes are compared: a source that got its release too early has overwritten them by now.
            if not may_fail and not read.result(0).confirmed:
                raise Harmed(f"the home does not confirm the read of {name}")
            for (layer, component), values in offered.content.items():
                if not np.array_equal(self.destination.plane(layer, component)[ids], values):
                    raise Harmed(f"wrong bytes of {name}, layer {layer}, {component}")
        if not read.wait_quiet(SOON):
            raise Harmed(f"the blocks that {name} was read into are not quiet")
        self.destination.free += ids

    def _check_pinned(self, read: list[Offered]) -> None:
        self._collect(0.0)
        for offered in read:
            if offered.release is not None:
                name, outcome = offered.publication.request_id, offered.release.outcome.name
                raise Harmed(f"{name} was released while it is read: {outcome}")

    def _released(self, offered: Offered) -> None:
        until = now() + SOON
        while offered.release is None:
            if now() > until:
                raise Harmed(f"{offered.publication.request_id} was not released in {SOON} s")
            self._collect(0.5)

    def _collect(self, timeout: float) -> None:
        for release in self.session.released(timeout):
            offered = self._pinned.pop(release.publication, None)
            if offered is None:
                raise Harmed(f"publication {release.publication} was released twice, or never was")
            offered.release = release
            for (layer, component), values in offered.content.items():
                self.source.plane(layer, component)[offered.ids[: len(values)]] = POISON - 1 - values
            self.source.free += offered.ids

    def _write(self, ids: list[int]) -> Content:
        shape = (len(ids), MODEL.heads, MODEL.block_tokens)
        content: Content = {}
        for layer in range(MODEL.layers):
            for component in MODEL.components:
                values = self._random.integers(0, POISON, (*shape, MODEL.state_bytes(component)), np.uint8)
                self.source.plane(layer, component)[ids] = values
                content[layer, component] = values
        return content
