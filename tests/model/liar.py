"""A peer that lies: any message of the protocol, with any public value in it, at any time, as often as it likes.

The peer knows all that is public: engine_ids, incarnations, publication and lease numbers, request_ids, the home's
epoch, page tokens, and messages of others without their secrets (session secrets, keys, lease_ids, read_ids). In place
of secrets it uses its own, or any public value of the same length.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from kvferry._wire.authority import SECRET_BYTES, PublicationKeys, incarnation_of
from kvferry._wire.reference import format_reference, parse_reference, router_reference
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef
from tests.model.host import ADVERTISE, Host
from tests.model.network import Pipe
from tests.model.source import BLOCKS, ENGINE_ID, LAYERS, group, registered

if TYPE_CHECKING:
    from tests.model.world import World

OWN_ID = "liar"
SECRET = b"liar".ljust(SECRET_BYTES, b"!")
STREAMS = 8
"""Streams that it holds open at once."""

LIES = ("reader", "reader", "listing", "source", "decline", "ask", "watch", "register", "replay", "own", "squat")

Request = pb.NotifyRequest | pb.ReadBlocksRequest | pb.WatchRequest


class Liar:
    """See the module. `tell` sends a lie to the home, without the network's losses and delays."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pipes: list[Pipe[Any]] = []
        self._heard: list[bytes] = []
        self._engines = [
            pb.EngineRef(engine_id=name, incarnation=incarnation_of(SECRET)) for name in (OWN_ID, ENGINE_ID)
        ]
        self._numbers = 0
        self.squats = False
        """Whether it may be the first at a home to have the source's engine_id."""

    def tell(self, what: str, turns: random.Random) -> None:
        """Send the home one lie of this kind; the answer is mostly an error."""
        host = self._world.host
        if host is None:
            return
        lie: Callable[[Host, random.Random], None] = getattr(self, f"_{what}")
        with suppress(KvferryError):
            lie(host, turns)
        host.pump(self._world.network.pipes)
        self._world.settle()

    # Lies.

    def _reader(self, host: Host, turns: random.Random) -> None:
        """Renew, report or cancel a read of another peer."""
        lease_id = self._secret(16, turns)
        reports = [
            pb.RankReport(rank=rank, outcome=turns.choice((1, 1, 2, 3, 4)))  # type: ignore[arg-type]
            for rank in range(turns.randint(1, 3))
        ]
        lies = [
            pb.Notification(renew=pb.Renew(lease_id=lease_id)),
            pb.Notification(read_done=pb.ReadDone(lease_id=lease_id, reports=reports)),
            pb.Notification(cancel=pb.CancelRead(lease_id=lease_id)),
        ]
        sender = turns.choice([self._ref(turns), *(reader.engine for reader in self._world.readers)])
        host.lie(pb.NotifyRequest(sender=sender, notifications=[turns.choice(lies)]))

    def _listing(self, host: Host, turns: random.Random) -> None:
        """List reads, keep every part of every token, and try a part as a secret at once."""
        request = ipb.ListTransfersRequest(page_size=turns.randint(1, 3))
        while True:
            answer = host.list_transfers(request)
            for part in answer.next_page_token.split("."):
                self._heard.append(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
            del self._heard[:-16]
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
        lease_id = turns.choice(self._heard[-3:])[:16].ljust(16, b"\0")
        for reader in self._world.readers:
            cancel = pb.Notification(cancel=pb.CancelRead(lease_id=lease_id))
            host.lie(pb.NotifyRequest(sender=reader.engine, notifications=[cancel]))

    def _source(self, host: Host, turns: random.Random) -> None:
        """Send notifications in a source's name."""
        number = self._number(turns)
        lies = [
            pb.Notification(publish=self._step(number, turns)),
            pb.Notification(abort=pb.Abort(publication=number)),
            pb.Notification(released_ack=pb.ReleasedAck(publications=[number])),
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN)),
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_END, high_water=number)),
        ]
        told = turns.sample(lies, turns.randint(1, 2))
        host.lie(pb.NotifyRequest(sender=self._ref(turns), session_secret=self._session(turns), notifications=told))

    def _decline(self, host: Host, turns: random.Random) -> None:
        decline = pb.Decline(reference=self._reference(turns))
        host.lie(pb.NotifyRequest(notifications=[pb.Notification(decline=decline)]))

    def _route(self, host: Host, turns: random.Random) -> None:
        """Send messages about a router's request: its name is public, its key is not."""
        names = [routed.name for routed in self._world.routed[-3:]] or ["room"]
        name, key = turns.choice(names), turns.choice((bytes(15) + b"!", self._secret(16, turns)))
        given = router_reference(ADVERTISE, ENGINE_ID, router_key=name, key=key)
        what = turns.choice(("decline", "decline", "ask", "publish"))
        if what == "decline":
            decline = pb.Notification(decline=pb.Decline(reference=given))
            host.lie(pb.NotifyRequest(notifications=[decline]))
        elif what == "ask":
            read_id, parties = self._secret(16, turns), turns.randint(1, 3)
            reader = turns.choice([self._ref(turns), *(reader.engine for reader in self._world.readers)])
            ask = pb.ReadBlocksRequest(reference=given, reader=reader, read_id=read_id, parties=parties)
            self._open(host, host.read_blocks(ask))
        else:
            # In the name of the source whose engine_id it uses, or of the source itself.
            sender = turns.choice((self._engines[1], self._world.source.engine))
            self._numbers += 1
            publish = pb.Publish(publication=self._numbers, request_id="request", groups=[group(0, (1,))], last=True)
            publish.router_key, publish.key = name, key
            told = [pb.Notification(publish=publish)]
            host.lie(pb.NotifyRequest(sender=sender, session_secret=SECRET, notifications=told))

    def _ask(self, host: Host, turns: random.Random) -> None:
        """Ask for a publication of another engine, in another reader's name."""
        request = pb.ReadBlocksRequest(
            reference=self._reference(turns),
            reader=self._ref(turns),
            read_id=self._secret(16, turns),
            parties=turns.randint(1, 3),
            expected_reads=turns.choice((0, 9)),
        )
        self._open(host, host.read_blocks(request))

    def _watch(self, host: Host, turns: random.Random) -> None:
        """Open a Watch as a process of another engine."""
        role = turns.choice((pb.WATCH_ROLE_SCHEDULER, pb.WATCH_ROLE_RANK))
        request = pb.WatchRequest(
            engine=self._ref(turns), session_secret=self._session(turns), role=role, resume_epoch=host.home.epoch
        )
        if self._may_watch(host, request):
            self._open(host, host.watch(request))

    def _register(self, host: Host, turns: random.Random) -> None:
        """Register a cache in a source's name."""
        ref = self._ref(turns)
        host.register(registered(EngineRef(ref.engine_id, ref.incarnation)), self._session(turns))

    def _replay(self, host: Host, turns: random.Random) -> None:
        """Repeat another peer's message, as far as it is public."""
        if not host.heard:
            return
        request = turns.choice(list(host.heard))
        again = copy.deepcopy(request)
        if isinstance(again, pb.NotifyRequest):
            self._replay_notify(host, again, turns)
        elif isinstance(again, pb.ReadBlocksRequest):
            parsed = parse_reference(again.reference)
            parsed.key = self._secret(16, turns)
            again.reference, again.read_id = format_reference(parsed), self._secret(16, turns)
            again.lease_id = self._secret(16, turns)
            self._open(host, host.read_blocks(again))
        else:
            again.session_secret = self._session(turns)
            if self._may_watch(host, again):
                self._open(host, host.watch(again))

    def _replay_notify(self, host: Host, again: pb.NotifyRequest, turns: random.Random) -> None:
        again.session_secret = self._session(turns)
        for notification in again.notifications:
            kind = notification.WhichOneof("kind")
            if kind in ("renew", "read_done", "cancel"):
                getattr(notification, kind).lease_id = self._secret(16, turns)
            elif kind == "publish" and notification.publish.router_key:
                notification.publish.key = self._secret(16, turns)
            elif kind == "decline":
                parsed = parse_reference(notification.decline.reference)
                parsed.key = self._secret(16, turns)
                notification.decline.reference = format_reference(parsed)
        host.lie(again)

    def _own(self, host: Host, turns: random.Random) -> None:
        """Act as an engine of its own: watch, register, publish, and read that in another's name."""
        self._live(host, self._engines[0], turns)

    def _squat(self, host: Host, turns: random.Random) -> None:
        """The same under the source's engine_id."""
        self._live(host, self._engines[1], turns)

    def _live(self, host: Host, ref: pb.EngineRef, turns: random.Random) -> None:
        request = pb.WatchRequest(engine=ref, session_secret=SECRET, role=pb.WATCH_ROLE_SCHEDULER)
        if not self._may_watch(host, request):
            return
        self._open(host, host.watch(request))
        host.register(registered(EngineRef(ref.engine_id, ref.incarnation)), SECRET)
        self._numbers += 1
        publish = pb.Publish(publication=self._numbers, request_id="request", groups=[group(0, (1,))])
        publish.last = turns.choice((True, False))
        phases = pb.RESYNC_PHASE_BEGIN, pb.RESYNC_PHASE_END
        told = [pb.Notification(resync=pb.Resync(phase=phase)) for phase in phases]
        told.append(pb.Notification(publish=publish))
        told += [pb.Notification(publish=self._step(self._numbers, turns)) for _ in range(4)]
        host.lie(pb.NotifyRequest(sender=ref, session_secret=SECRET, notifications=told))
        reference = pb.Reference(home=ADVERTISE, engine_id=ref.engine_id, incarnation=ref.incarnation)
        reference.publication, reference.key = self._numbers, PublicationKeys(SECRET).key(self._numbers)
        ask = pb.ReadBlocksRequest(
            reference=format_reference(reference), reader=self._ref(turns), read_id=self._secret(16, turns), parties=1
        )
        self._open(host, host.read_blocks(ask))

    def _may_watch(self, host: Host, request: pb.WatchRequest) -> bool:
        """Whether this Watch does not take the engine_id by the protocol: an engine that is not back in an engine_ttl,
        from its home's restart or from the loss of its Watch, loses its engine_id to the next engine that asks."""
        if request.engine != self._engines[1] or self.squats:
            return True
        engines = host.home.engines.engines()
        return any(engine.ref == self._world.source.ref and engine.lost_at is None for engine in engines)

    # Values in lies.

    def _ref(self, turns: random.Random) -> pb.EngineRef:
        """Return an engine: a present or former source, a reader, or the liar itself."""
        sources = [offered.source.engine for offered in self._world.offered[-4:]]
        readers = [reader.engine for reader in self._world.readers]
        return turns.choice([self._world.source.engine, self._world.source.engine, *sources, *readers, *self._engines])

    def _step(self, number: int, turns: random.Random) -> pb.Publish:
        """A step that may follow, or contradict itself and earlier steps."""
        step = pb.Publish(publication=number, request_id="request", step=turns.randrange(5))
        step.last = turns.choice((True, False, False))
        if turns.choice((True, False)):
            step.groups.append(self._blocks(turns))
        if turns.choice((True, False)):
            step.unfinished.layers.extend(turns.sample(LAYERS, turns.randint(0, len(LAYERS))))
            step.unfinished.groups.extend(self._blocks(turns) for _ in range(turns.choice((0, 1, 1, 2))))
        return step

    def _blocks(self, turns: random.Random) -> pb.GroupBlocks:
        blocks = turns.sample(range(1, BLOCKS + 1), turns.randint(1, 2))
        return group(turns.randrange(3), blocks)

    def _number(self, turns: random.Random) -> int:
        published = [offered.number for offered in self._world.offered[-4:]] or [1]
        return max(1, turns.choice(published) + turns.choice((0, 0, 0, 1, 2, 50)))

    def _reference(self, turns: random.Random) -> str:
        ref, number = self._ref(turns), self._number(turns)
        key = turns.choice((PublicationKeys(SECRET).key(number), self._secret(16, turns)))
        return format_reference(
            pb.Reference(
                home=ADVERTISE,
                engine_id=ref.engine_id,
                incarnation=ref.incarnation,
                publication=number,
                request_id="request",
                key=key,
            )
        )

    def _session(self, turns: random.Random) -> bytes:
        return turns.choice((SECRET, SECRET, self._secret(SECRET_BYTES, turns)))

    def _secret(self, size: int, turns: random.Random) -> bytes:
        """A public value of a secret's length: a number, a name, a token's part."""
        leases = [lease.number for lease in cast(Host, self._world.host).home.records.leases()][-4:]
        number = turns.choice([*leases, *leases, self._number(turns)])
        found = [
            number.to_bytes(size, "big"),
            number.to_bytes(size, "big"),
            self._ref(turns).incarnation,
            cast(Host, self._world.host).home.epoch,
            SECRET,
            *self._heard[-3:],
        ]
        return turns.choice(found)[:size].ljust(size, b"\0")

    def _open(self, host: Host, server: Any) -> None:
        pipe = Pipe[Any](lambda _: None, lambda _: None, server=server)
        self._world.network.pipes.append(pipe)
        self._pipes.append(pipe)
        host.pump([pipe])
        pipe.messages.clear()
        if len(self._pipes) > STREAMS:
            self._world.network.cut(self._pipes.pop(0))
        if server.error is not None:
            raise server.error
