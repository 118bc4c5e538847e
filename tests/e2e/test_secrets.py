"""No secret in anything that a stranger can ask for, in no error, no log line and no output of the command line
(PROTOCOL, Authority). Real engines, real NIXL, a node server in a process of its own that logs all it can."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, EngineSpec, Group, KvferryError, Prompt
from kvferry._cache import runtime_of
from kvferry._wire.authority import PublicationKeys, read_id_of
from kvferry._wire.reference import (
    format_reference,
    parse_engine_reference,
    parse_reference,
    question_reference,
    router_reference,
)
from kvferry._wire.token import engine_ref
from kvferry.engine import Grant
from kvferry.errors import PromptMismatch
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.e2e.secrets_in import forms, found
from tests.support.admin_listeners import get
from tests.support.command_line import run_kvferry
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

pytestmark = pytest.mark.slow

GROUP = Group("full", block_tokens=16, num_blocks=8)
AXES = ("kv", "block", "head", "token", "content")


ADMIN_PATHS = (
    "/",
    "/metrics",
    "/healthz",
    "/readyz",
    "/statusz",
    "/statusz/engines",
    "/statusz/requests",
    "/statusz/reads",
    "/statusz/last-reads",
)
"""All that the admin listener shows of this scene."""


class Scene:
    """A source, a reader, and what a stranger sees of them."""

    def __init__(
        self, server: NodeServerProcess, admin: str, source: Client, reader: Client, channel: grpc.Channel
    ) -> None:
        self.server = server
        self.admin = admin
        self.reader_client = reader
        self.source = cache(source, "source")
        self.reader = cache(reader, "reader")
        self.kv: Any = KVTransferStub(channel)
        self.introspection: Any = IntrospectionStub(channel)
        self.secrets = {
            "the source's session secret": self.source.session.token.session_secret,
            "the reader's session secret": self.reader.session.token.session_secret,
            "the source's agent metadata": part_of(self.source),
        }
        self.seen: dict[str, bytes] = {}

    def sees(self, where: str, what: object) -> None:
        """Somebody was shown this."""
        name = f"{where} #{len(self.seen)}"
        self.seen[name] = what if isinstance(what, bytes) else f"{what}\n{what!r}".encode()

    def asks(self, name: str, call: Callable[..., Any], request: Any) -> Any:
        """A stranger's call, and all that comes back of it."""
        try:
            answer = call(request, timeout=10)
        except grpc.RpcError as error:
            failed: Any = error
            self.sees(f"error of {name}", failed)
            for key, value in failed.trailing_metadata() or ():
                self.sees(f"trailing metadata {key} of {name}", value)
            return None
        self.sees(f"answer of {name}", answer.SerializeToString())
        self.sees(f"answer of {name}", answer)
        return answer

    def looks(self, when: str) -> None:
        """A stranger asks for everything there is."""
        ask, service = self.asks, self.introspection
        ask(f"ListEngines {when}", service.ListEngines, ipb.ListEnginesRequest(page_size=1))
        for engine_id in ("source", "reader"):
            ask(f"GetEngine {when}", service.GetEngine, ipb.GetEngineRequest(engine_id=engine_id))
        lists = (
            (service.ListEngines, ipb.ListEnginesRequest),
            (service.ListRequests, ipb.ListRequestsRequest),
            (service.ListTransfers, ipb.ListTransfersRequest),
        )
        for call, request in lists:
            token = "first"
            while token:
                token = "" if token == "first" else token
                page = ask(f"{request.__name__} {when}", call, request(page_size=1, page_token=token))
                token = page.next_page_token if page is not None else ""
                # A client may well decode it.
                self.sees(f"page_token of {request.__name__} {when}", token)
        self.handshakes(when, "")
        plan = ipb.PlanReadRequest(source_engine_id="source", destination_engine_id="reader")
        ask(f"PlanRead {when}", service.PlanRead, plan)
        for command in ("engines", "engine source", "requests", "transfers", "plan source reader"):
            for more in ((), ("--json",)):
                done = run_kvferry(*command.split(), *more, "--server", self.server.address)
                self.sees(f"kvferry {command} {when}", done.stdout + done.stderr)
        for path in ADMIN_PATHS:
            got = get(self.admin, path)
            assert got.code == 200, path
            self.sees(f"{path} {when}", got.body)

    def handshakes(self, when: str, reference: str) -> None:
        """A stranger handshakes with the source."""
        token, like = self.source.session.token, runtime_of(self.source)._registration
        request = pb.HandshakeRequest(
            engine_id=token.engine_id,
            incarnation=token.incarnation,
            reader=pb.EngineRef(engine_id="stranger", incarnation=b"s" * 16),
            groups=like.groups,
            rank=like.rank,
            reference=reference,
        )
        self.asks(f"Handshake {when}", self._merged, request)

    def asks_for_prompts(self, wrong: list[str]) -> None:
        """A stranger asks the source for a prompt, which it does not answer, and by wrong references."""
        session = self.source.session
        reader, given = engine_ref(self.reader.session.token), question_reference(self.server.address, "source")
        self.secrets["key of a question"] = parse_reference(given).key
        self.secrets["adapter of a prompt"] = b"an adapter that a stranger asks for"
        prompt = pb.Prompt(token_ids=[1], adapter=self.secrets["adapter of a prompt"].decode())
        for text, whole in [(given, session.engine_reference), (given, ""), *((text, text) for text in wrong)]:
            ask = pb.Ask(reference=text, engine_reference=whole, prompt=prompt)
            request = pb.NotifyRequest(sender=reader, notifications=[pb.Notification(ask=ask)])
            self.asks("Notify", self.kv.Notify, request)
        read = pb.ReadBlocksRequest(reference=given, reader=reader, read_id=b"r" * 16, parties=1)
        self.asks("ReadBlocks", self.kv.ReadBlocks, read)
        self.looks("after a question")

    def _merged(self, request: pb.HandshakeRequest, timeout: float) -> pb.HandshakeResponse:
        whole = pb.HandshakeResponse()
        for page in self.kv.Handshake(request, timeout=timeout):
            whole.MergeFrom(page)
        assert whole.ranks
        return whole

    def leases(self) -> None:
        """Take note of the leases that the reader holds."""
        for index, lease in enumerate(self.reader_client._runtime.renewals._kept):
            self.secrets[f"lease_id {index} of {len(self.secrets)}"] = lease.lease_id

    def fails(self, reference: str, read_id: bytes) -> None:
        """Errors of each kind, also with secrets where none belong."""
        parsed = parse_reference(reference)
        source, reader = engine_ref(self.source.session.token), engine_ref(self.reader.session.token)
        longer = pb.Reference()
        longer.CopyFrom(parsed)
        longer.key += b"x"
        other = pb.Reference()
        other.CopyFrom(parsed)
        other.publication += 1
        texts = [reference[:-3], reference + "AAAA", format_reference(longer), format_reference(other)]
        for text in texts:
            self.handshakes("with a bad reference", text)
        for text in (reference, *texts):
            for changes in ({"parties": 7}, {"parties": 0}, {"read_id": read_id + b"x"}, {}):
                given: dict[str, Any] = {
                    "reference": text,
                    "reader": reader,
                    "read_id": read_id,
                    "parties": 1,
                    **changes,
                }
                self.asks("ReadBlocks", self._read_blocks, pb.ReadBlocksRequest(**given, next_step=9))
            decline = pb.Notification(decline=pb.Decline(reference=text))
            if text != reference:
                self.asks("Notify", self.kv.Notify, pb.NotifyRequest(notifications=[decline]))
        self.asks_for_prompts(texts)
        for secret in tuple(self.secrets.values()):
            said = [
                pb.Notification(renew=pb.Renew(lease_id=secret + b"x")),
                pb.Notification(read_done=pb.ReadDone(lease_id=secret + b"x")),
                pb.Notification(cancel=pb.CancelRead(lease_id=secret + b"x")),
                pb.Notification(renew=pb.Renew(lease_id=secret[:16])),
            ]
            self.asks("Notify", self.kv.Notify, pb.NotifyRequest(sender=source, notifications=said))
            abort = pb.Notification(abort=pb.Abort(publication=9))
            for wrong in (secret, secret + b"x", secret[:16]):
                self.asks(
                    "Notify",
                    self.kv.Notify,
                    pb.NotifyRequest(sender=reader, session_secret=wrong, notifications=[abort]),
                )
                watch = pb.WatchRequest(engine=reader, session_secret=wrong[::-1], role=pb.WATCH_ROLE_SCHEDULER)
                self.asks("Watch", lambda request, timeout: next(self.kv.Watch(request, timeout=timeout)), watch)
                self.asks(
                    "ReadChecksums",
                    self.kv.ReadChecksums,
                    pb.ReadChecksumsRequest(reader=source, lease_id=wrong),
                )

    def _read_blocks(self, request: pb.ReadBlocksRequest, timeout: float) -> pb.ReadBlocksResponse:
        answer: pb.ReadBlocksResponse = self.kv.ReadBlocks(request, timeout=timeout)
        # The reader itself was told its lease; what others see is checked.
        answer.accepted.ClearField("lease_id")
        for step in answer.blocks:
            step.ClearField("marks")
        return answer


def cache(client: Client, engine_id: str) -> Cache:
    cells = np.zeros((2, 8, 1, 16, 8), np.uint8)
    return client.register_cache(EngineSpec(engine_id, (GROUP,)), tensors={"layers.0": cells}, axes=AXES)


def part_of(cache: Cache) -> bytes:
    """A piece of the agent's metadata that is not found anywhere by chance."""
    metadata = runtime_of(cache)._registration.agent.metadata
    return metadata[len(metadata) // 2 :][:32]


@pytest.fixture(params=["text", "json"])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    admin, form = f"127.0.0.1:{free_port()}", request.param
    server = NodeServerProcess(
        tmp_path / "home", tcp=True, log_level="debug", log_format=form, admin=admin, engine_ttl=5, drain=0
    )
    with (
        server,
        Client(server.address) as source,
        Client(server.address) as reader,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Scene(server, admin, source, reader, channel)


def test_secrets_are_found_in_every_form() -> None:
    """The search itself: what it does not find here it would not find there."""
    secret = os.urandom(16)
    for form, written in forms(secret):
        assert found({"s": secret}, {"x": b"before" + written + b"after"}), form
    for before in range(5):
        text = format_reference(
            pb.Reference(home="h" * (before + 1), engine_id="e", incarnation=b"i" * 16, publication=1, key=secret)
        )
        assert found({"s": secret}, {"x": text.encode()})
    assert found({"s": secret}, {"x": str(pb.Renew(lease_id=secret)).encode()})
    assert found({"s": secret}, {"x": repr([secret]).encode()})
    assert not found({"s": secret}, {"x": os.urandom(4096)})


def test_secrets_are_seen_by_no_other_party(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    session, secrets = scene.source.session, scene.secrets
    prompt = Prompt(range(40))
    begun = session.publish("begun", {"full": Blocks([1, 2])}, last=False, expected_reads=3, prompt=prompt)
    parsed = parse_reference(begun.reference)
    secrets["key"] = PublicationKeys(session.token.session_secret).key(begun.number)
    assert parsed.key == secrets["key"]
    secrets["a mark"], secrets["a prompt's digest"] = prompt.mark(parsed.key, 40), prompt.digest(40)
    secrets["engine key"] = parse_engine_reference(session.engine_reference).key
    reads = [
        scene.reader.read(begun.reference, {"full": Blocks([number, number + 1])}, read_id=f"read {number}")
        for number in (1, 3)
    ]
    another = scene.reader.read(begun.reference, {"full": Blocks([7])}, prompt=Prompt(range(1, 41)))
    mismatch = another.exception(20)
    assert isinstance(mismatch, PromptMismatch)
    scene.sees("error of a read with another prompt", mismatch)
    secrets["another prompt's mark"] = Prompt(range(1, 41)).mark(parsed.key, 40)
    for read in reads:
        secrets[f"read_id of {read.read_id}"] = read_id_of(scene.reader.session.token.session_secret, read.read_id)
    until(lambda: len(scene.reader_client._runtime.renewals._kept) == 2)
    scene.leases()
    scene.looks("while reads wait")
    scene.fails(begun.reference, secrets["read_id of read 1"])
    scene.looks("after errors")

    routed = router_reference(session.token.home, session.token.engine_id, router_key="routed")
    secrets["a router's key"] = parse_reference(routed).key
    asked = scene.reader.read(routed, {"full": Blocks([0])}, timeout=60)
    until(lambda: b"routed" in scene.introspection.ListTransfers(ipb.ListTransfersRequest()).SerializeToString())
    scene.looks("while a read waits under a router's key")
    under_it = session.publish("under a router's key", {"full": Blocks([5])}, reference=routed)
    assert asked.result(20).confirmed
    scene.looks("after it")
    for once_more in (routed, under_it.reference):
        with pytest.raises(KvferryError) as caught:
            session.publish("again", {"full": Blocks([6])}, reference=once_more)
        scene.sees("error of publish", caught.value)
    late = scene.reader.read(routed, {"full": Blocks([0])}, timeout=5)
    scene.sees("error of a late read", late.exception(20))

    session.publish_more(begun, {}, last=True)
    for read in reads:
        assert read.result(20).confirmed
    scene.looks("after the reads")
    scene.fails(begun.reference, secrets["read_id of read 1"])

    declined = session.publish("declined", {"full": Blocks([3])})
    secrets["key of the declined"] = parse_reference(declined.reference).key
    scene.reader_client.decline(declined.reference)
    failed = scene.reader.read(declined.reference, {"full": Blocks([5])}, timeout=5)
    scene.sees("error of a read", failed.exception(20))
    lost = session.publish("lost", {"full": Blocks([4])}, last=False)
    secrets["key of the lost"] = parse_reference(lost.reference).key
    waiting = scene.reader.read(lost.reference, {"full": Blocks([6])}, timeout=8)
    until(lambda: len(scene.reader_client._runtime.renewals._kept) == 1)
    scene.leases()
    scene.looks("while another read waits")
    scene.server.stop(signal.SIGKILL)
    scene.sees("error of a read", waiting.exception(30))
    with suppress(KvferryError):
        session.publish("unheard", {"full": Blocks([7])}, timeout=1)

    grant = Grant("r", "n", "h", "e", b"i" * 16, 1, begun.reference, "s", secrets["key"], 1.0, ())
    for shown in (session.token, begun, lost, *reads, waiting, failed, asked, late, *session.released(), grant):
        scene.sees("a repr", repr(shown))
    scene.sees("the reader's and the source's log", caplog.text)
    # One request is found in all three logs by one name.
    told = [record.getMessage() for record in caplog.records if "request_id='begun'" in record.getMessage()]
    assert any(line.startswith("published") for line in told)
    assert sum(" ended: " in line for line in told) == 2
    assert "released: request_id='declined'" in caplog.text
    log = (scene.server.folder / "log").read_bytes()
    assert log.count(b"lease_granted") >= 3
    assert b"question_ended" in log
    assert b"begun" in log
    scene.sees("the node server's log", log)
    assert found(secrets, scene.seen) == []
