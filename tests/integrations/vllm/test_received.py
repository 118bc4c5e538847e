"""How vLLM's scheduler learns which reads have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvferry.integrations.vllm.connector import KvferryConnector


def test_vllm_reads_the_received_requests_after_the_connector_has_added_its_own() -> None:
    """These reads end between two steps, and vLLM's workers do not report them: see `update_connector_output`."""
    connector = object.__new__(KvferryConnector)
    own = SimpleNamespace(collect=lambda news, lost: None, told=lambda received: None, take_received=lambda: {"read"})
    connector._scheduler = cast(Any, own)
    waiting = SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    vllms = SimpleNamespace(
        connector=connector,
        requests={"read": waiting, "reported": waiting},
        finished_recving_kv_req_ids=set(),
        _set_kv_fetch_stage=lambda *_: None,
    )
    Scheduler._update_from_kv_xfer_finished(cast(Any, vllms), KVConnectorOutput(finished_recving={"reported"}))
    assert vllms.finished_recving_kv_req_ids == {"read", "reported"}
