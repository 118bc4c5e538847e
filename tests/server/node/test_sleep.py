"""A server that slept for longer than a publication's final deadline: its source may have released by itself, so
nothing of it is granted on waking, whatever was asked meanwhile."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvferry._wire.status import from_rpc_error
from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.node_in_process import (
    TIMEOUT,
    proto,
    publish_notification,
    read_done,
    read_request,
    register_request,
    snapshot,
)
from tests.support.node_servers import Kvferryd
from tests.support.parties import SECRETS, D, P, read_id
from tests.support.stubs import KVTransferStub

pytestmark = pytest.mark.slow

FINAL = 2.0


def test_server_that_wakes_from_sleep_grants_and_confirms_nothing_that_has_ended(tmp_path: Path) -> None:
    arguments = [
        "--listen",
        "",
        "--unix",
        str(tmp_path / "s"),
        "--ttl",
        "1.5",
        "--max-ttl",
        "1.5",
        "--final",
        str(FINAL),
    ]
    arguments += ["--drain", "0"]
    with (
        Kvferryd(*arguments) as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(2) as calls,
    ):
        kv = KVTransferStub(channel)
        secret = SECRETS[P]
        watch = kv.Watch(pb.WatchRequest(engine=proto(P), session_secret=secret, role=pb.WATCH_ROLE_SCHEDULER))
        assert [next(watch).WhichOneof("event") for _ in range(2)] == ["opened", "synced"]
        said = pb.NotifyRequest(sender=proto(P), session_secret=secret, notifications=snapshot())
        kv.Notify(said, timeout=TIMEOUT)
        kv.RegisterCache(register_request(), timeout=TIMEOUT)
        published = pb.NotifyRequest(sender=proto(P), session_secret=secret, notifications=[publish_notification()])
        [answer] = kv.Notify(published, timeout=TIMEOUT).results
        assert answer.WhichOneof("kind") == "published"
        lease_id = kv.ReadBlocks(read_request(), timeout=TIMEOUT).accepted.lease_id

        server.signal(signal.SIGSTOP)
        # These calls wait in the server's socket while it sleeps.
        late = calls.submit(lambda: kv.ReadBlocks(read_request(read_id=read_id("late")), timeout=TIMEOUT))
        done = pb.NotifyRequest(sender=proto(D), notifications=[read_done(lease_id, 0)])
        report = calls.submit(lambda: kv.Notify(done, timeout=TIMEOUT))
        time.sleep(FINAL + 0.5)  # What the server sleeps is what is tested.
        server.signal(signal.SIGCONT)

        with pytest.raises(grpc.RpcError) as caught:
            late.result(TIMEOUT)
        error = from_rpc_error(caught.value, "test")
        assert isinstance(error, KvferryError)
        assert error.reason == "PUBLICATION_RELEASED", error
        assert report.result(TIMEOUT).results[0].read_ended.verdict == pb.VERDICT_EXPIRED
        released = next(watch).released
        assert released.outcome == pb.RELEASE_OUTCOME_FINAL
        watch.cancel()
