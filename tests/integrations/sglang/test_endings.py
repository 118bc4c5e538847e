"""When SGLang may use pages again: sender and receiver between a played SGLang and played ports."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvferry import EngineSpec, Group, Prompt, Release, ReleaseOutcome
from kvferry.engine import WorkerOutput
from kvferry.errors import EngineUnknown, InvalidField
from kvferry.integrations.sglang import hooks
from kvferry.integrations.sglang.hooks import MAKES_RECEIVERS, MAKES_SENDERS, tell_receiver, tell_sender
from kvferry.integrations.sglang.manager import KvferryManager
from kvferry.integrations.sglang.metrics import counts_of
from kvferry.integrations.sglang.requests import KvferryReceiver, KvferrySender
from tests.integrations.sglang.played import GIVEN, PROMPT, ROOM, PlayedManager, reading


def test_pages_of_a_failed_read_are_held_until_it_is_quiet() -> None:
    manager = PlayedManager()
    receiver = reading(manager)
    manager.current.error, manager.current.ended = EngineUnknown("it has ended"), True
    assert receiver.poll() == KVPoll.Failed
    receiver.ensure_abort_notified(force_arm=True)
    assert receiver.abort_notified
    assert not manager.is_abort_release_safe(ROOM, len(receiver.bootstrap_infos))
    manager.current.quiet = True
    assert manager.is_abort_release_safe(ROOM, 0)
    with pytest.raises(Exception, match="EngineUnknown"):
        receiver.failure_exception()


def test_rank_stops_reading_when_another_rank_has_failed() -> None:
    manager = PlayedManager()
    receiver = reading(manager)
    receiver.ensure_abort_notified(force_arm=True)
    assert manager.current.cancelled
    assert manager.told == ["decline"]
    assert not manager.is_abort_release_safe(ROOM, 0)
    manager.current.quiet = True
    manager.clear_deferred_abort_state(ROOM)
    # The answer no longer depends on this read.
    manager.current.quiet = False
    receiver.clear()
    assert manager.is_abort_release_safe(ROOM, 0)


def test_each_rank_hears_of_the_reads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, outputs = PlayedManager(), [WorkerOutput(0), WorkerOutput(1)]
    group = SimpleNamespace(all_gather_object=lambda own: outputs)
    monkeypatch.setattr("kvferry.integrations.sglang.manager.get_parallel", lambda: SimpleNamespace(tp_group=group))
    for manager.parties in (1, 2):
        assert manager.gathered(outputs[0]) == outputs[: manager.parties]


@pytest.mark.parametrize("started", [True, False])
def test_repeated_request_fails_and_the_read_of_the_first_goes_on(started: bool) -> None:
    """Routers and clients repeat requests, with the room of the first, which may be waiting for pages."""
    manager = PlayedManager()
    first = reading(manager) if started else KvferryReceiver(manager, "127.0.0.1:8998", ROOM)
    for aborted in (False, True):
        again = KvferryReceiver(manager, "127.0.0.1:8998", ROOM)
        again.init(0)
        if aborted:
            again.abort()
        assert again.poll() == KVPoll.Failed
        again.ensure_abort_notified(force_arm=True)
        assert not again.abort_notified
        again.clear()
    assert manager.told == []
    assert not manager.current.cancelled
    assert first.poll() == (KVPoll.Transferring if started else KVPoll.Bootstrapping)
    assert manager.is_abort_release_safe(ROOM, 0) != started


@pytest.mark.parametrize("room", [None, 0, -1, 2**63, 2**64, 2**70])
def test_rooms_that_sglang_cannot_hand_over_fail_on_both_sides(room: Any) -> None:
    """Before prefill computes: its scheduler ends where it writes a room of more than 63 bits into its row."""
    manager = PlayedManager()
    assert KvferryReceiver(manager, "127.0.0.1:8998", room).poll() == KVPoll.Failed
    sender = KvferrySender(manager, "127.0.0.1:8998", room)
    assert sender.poll() == KVPoll.Failed
    sender.abort()
    with pytest.raises(Exception, match="bootstrap_room"):
        sender.failure_exception()
    assert manager.told == []


class Queue:
    """Decode's queue, of a version of SGLang that gives failed requests' pages back at once."""

    enable_deferred_kv_release = False
    deferred_kv_release_timeout = 30.0


class HoldingQueue(Queue):
    """Decode's queue, of a version that can hold them."""

    def resolve_deferred_releases(self) -> None:
        raise NotImplementedError


def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the hooks on the methods that make senders and receivers, as SGLang installs a plug-in's."""
    hooks = {MAKES_SENDERS: tell_sender, MAKES_RECEIVERS: tell_receiver}
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "_hooks", {each: [(HookType.AFTER, hook, None)] for each, hook in hooks.items()})
    for queue, name in (
        (PrefillBootstrapQueue, "create_sender"),
        (DecodePreallocQueue, "_create_receiver_and_enqueue"),
    ):
        monkeypatch.setattr(queue, name, getattr(queue, name))
    HookRegistry.apply_hooks()


def test_decode_does_not_start_if_sglang_would_not_hold_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang goes on if a plug-in's hook fails, and says so in its log only."""
    used = SimpleNamespace(disaggregation_transfer_backend="kvferry")
    monkeypatch.setattr("sglang.srt.runtime_context.get_disagg", lambda: used)
    monkeypatch.setattr(hooks, "queues_that_hold", [])
    for queue in (None, Queue()):
        if queue is not None:
            hooks.hold_until_quiet(None, queue)
        with pytest.raises(InvalidField, match="holds the pages of failed requests"):
            KvferryManager(SimpleNamespace(), DisaggregationMode.DECODE, None)
    held = HoldingQueue()
    hooks.hold_until_quiet(None, held)
    wrapped(monkeypatch)
    assert held.enable_deferred_kv_release
    assert math.isinf(held.deferred_kv_release_timeout)
    # Both calls go on, to code that this test does not provide.
    for mode in (DisaggregationMode.DECODE, DisaggregationMode.PREFILL):
        with pytest.raises(AttributeError):
            KvferryManager(SimpleNamespace(), mode, None)


def test_sglang_keeps_rooms_of_63_bits_and_no_larger() -> None:
    buffers = torch.zeros((1, 8), dtype=torch.uint64)
    buffers[0, 0] = 2**63 - 1
    with pytest.raises(ValueError, match="Overflow"):
        buffers[0, 0] = 2**63


def published(manager: PlayedManager) -> KvferrySender:
    sender = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(3, 0)
    sender.send(np.array([3, 4]), None, num_kv_tokens=32)
    assert manager.told == []
    sender.send(np.array([9]), [], num_kv_tokens=7)
    return sender


def test_chunks_of_one_page_and_the_last_are_taken() -> None:
    sender = KvferrySender(PlayedManager(), "127.0.0.1:8998", ROOM)
    taken = [sender.should_send_kv_chunk(pages, last) for pages, last in ((0, False), (1, False), (0, True))]
    assert taken == [False, True, True]


def test_a_rank_starts_only_with_the_token_of_the_session() -> None:
    manager = PlayedManager(leader=False)
    spec = EngineSpec("prefill", (Group("full", block_tokens=16, num_blocks=8),))
    for token in ("token", ""):
        ranks = SimpleNamespace(broadcast_object=lambda given, src, token=token: token)
        if token:
            assert manager._open(spec, ranks) == token
        else:
            with pytest.raises(RuntimeError, match="rank 0"):
                manager._open(spec, ranks)


def test_published_pages_stay_until_the_release_also_after_an_abort() -> None:
    manager = PlayedManager()
    sender = published(manager)
    assert sender.poll() == KVPoll.Transferring
    sender.abort()
    assert manager.told == ["publish", "abort"]
    assert sender.poll() == KVPoll.Transferring
    manager.released = Release(1, "r", ReleaseOutcome.ABORTED)
    assert sender.poll() == KVPoll.Failed


def test_sender_succeeds_when_its_publication_was_read() -> None:
    manager = PlayedManager()
    sender = published(manager)
    manager.released = Release(1, "r", ReleaseOutcome.READ)
    assert sender.poll() == KVPoll.Success


def test_request_aborted_before_its_publication_is_declined() -> None:
    manager = PlayedManager()
    sender = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    assert manager.told == ["decline"]


def test_a_request_that_is_repeated_at_prefill_fails_and_the_first_is_published() -> None:
    """Also if the repetition is aborted, which a client does that gives up and asks again."""
    manager = PlayedManager()
    first = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    again = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    assert again.poll() == KVPoll.Failed
    again.abort()
    with pytest.raises(Exception, match="another request"):
        again.failure_exception()
    assert manager.told == []
    first.init(1, 0)
    first.send(np.array([3]), [], num_kv_tokens=7)
    assert manager.told == ["publish"]
    manager.released = Release(1, "r", ReleaseOutcome.ABORTED)
    assert first.poll() == KVPoll.Failed
    with pytest.raises(Exception, match="ABORTED"):
        first.failure_exception()
    # The request has ended, so the next request with this room is not refused.
    assert KvferrySender(manager, "127.0.0.1:8998", ROOM).poll() == KVPoll.WaitingForInput


def test_ranks_other_than_the_first_publish_nothing_and_never_fail() -> None:
    """SGLang takes the least of all ranks' answers, so theirs must not end a request that rank 0 waits for."""
    manager = PlayedManager(leader=False)
    sender = published(manager)
    sender.abort()
    assert sender.poll() == KVPoll.Success
    assert manager.told == []


@pytest.mark.parametrize(("address", "asked"), [(f"{GIVEN}:1", (16, 30)), ("127.0.0.1:8998", None)])
def test_prompt_that_another_engine_prefills_is_read_while_it_is_computed(address: str, asked: object) -> None:
    """SGLang's own prefill publishes all at once."""
    manager = PlayedManager()
    receiver = KvferryReceiver(manager, address, ROOM)
    receiver.expect_prompt("r", 30, PROMPT)
    receiver.init(0)
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.send_metadata(np.array([3]), 0, [], decode_prefix_len=16)
    assert manager.asked == asked


@pytest.mark.parametrize("aborted", [False, True])
def test_a_reference_that_a_request_carries_is_declined_only_if_it_is_aborted(aborted: bool) -> None:
    """After a failure the router may let another engine read it."""
    manager = PlayedManager()
    receiver = KvferryReceiver(manager, f"{GIVEN}:1", ROOM)
    receiver.expect_prompt("r", 16, Prompt.unknown)
    receiver.init(0)
    receiver.send_metadata(np.array([3]), 0, [], decode_prefix_len=0)
    assert receiver.poll() == KVPoll.Transferring
    if aborted:
        receiver.abort()
    else:
        receiver.ensure_abort_notified(force_arm=True)
    assert manager.current.cancelled
    assert manager.told == ["decline"] * aborted


def test_a_prompt_of_another_length_fails() -> None:
    """Also one of as many pages."""
    for tokens in (16, 17, 29, 30, 31, 32, 33):
        manager = PlayedManager()
        manager.aux.write = lambda row, payload, room, tokens=tokens: tokens
        manager.current.result = lambda timeout: SimpleNamespace(payload=b"row", bytes=64, prompt="matched")
        receiver = reading(manager)
        manager.current.ended = True
        assert (receiver.poll() == KVPoll.Success) == (tokens == 30)


def test_prompt_of_unknown_length_is_not_read() -> None:
    """Lengths that differ by less than a page need the same pages, so the last page may be that of another prompt."""
    manager = PlayedManager()
    receiver = KvferryReceiver(manager, "127.0.0.1:8998", ROOM)
    receiver.init(0)
    receiver.send_metadata(np.array([3, 4]), 0, [], decode_prefix_len=0)
    assert receiver.poll() == KVPoll.Failed
    assert manager._reads == {}
    with pytest.raises(Exception, match="how many tokens the prompt has"):
        receiver.failure_exception()


def test_instance_does_not_start_if_sglang_would_not_pass_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "queues_that_hold", ["HoldingQueue"])
    for mode, queue, name in (
        (DisaggregationMode.PREFILL, PrefillBootstrapQueue, "create_sender"),
        (DisaggregationMode.DECODE, DecodePreallocQueue, "_create_receiver_and_enqueue"),
    ):
        with pytest.raises(InvalidField, match="tells the backend each prompt"):
            KvferryManager(SimpleNamespace(), mode, None)
        monkeypatch.delattr(queue, name)
        with pytest.raises(InvalidField, match="tells the backend each prompt"):
            KvferryManager(SimpleNamespace(), mode, None)


def test_releases_are_counted_and_reported_to_their_request_once() -> None:
    ended = [[Release(number, "r", ReleaseOutcome.READ) for number in (1, 2)]]

    def counted() -> float:
        return REGISTRY.get_sample_value("kvferry_source_released_total", {"tp_rank": "0", "outcome": "read"}) or 0.0

    manager: Any = SimpleNamespace(
        port=SimpleNamespace(released=lambda: ended.pop() if ended else []),
        counts=counts_of(0),
        _released={},
        breathe=lambda: None,
    )
    before = counted()
    for number in (2, 1):
        publication: Any = SimpleNamespace(number=number)
        release = KvferryManager.take_release(manager, publication)
        assert release is not None
        assert release.publication == number
        assert KvferryManager.take_release(manager, publication) is None
    assert counted() == before + 2


def test_reads_are_counted_by_outcome() -> None:
    def counted() -> dict[str, float]:
        def value(name: str, **labels: str) -> float:
            return REGISTRY.get_sample_value(f"kvferry_reader_{name}_total", {"tp_rank": "0", **labels}) or 0.0

        found = {outcome: value("reads", outcome=outcome) for outcome in ("done", "failed", "cancelled")}
        return {**found, "bytes": value("bytes"), "EngineUnknown": value("failures", reason="EngineUnknown")}

    before = counted()
    manager = PlayedManager()
    manager.aux.write = lambda row, payload, room: 30
    manager.current.result = lambda timeout: SimpleNamespace(payload=b"row", bytes=64, prompt="matched")
    receiver = reading(manager)
    manager.current.ended = True
    assert receiver.poll() == KVPoll.Success
    receiver.clear()
    failed = reading(PlayedManager())
    failed.kv_mgr.current.error, failed.kv_mgr.current.ended = EngineUnknown("it has ended"), True
    assert failed.poll() == failed.poll() == KVPoll.Failed
    failed.abort()
    reading(PlayedManager()).abort()
    added = {name: value - before[name] for name, value in counted().items()}
    assert added == {"done": 1, "failed": 1, "cancelled": 1, "bytes": 64, "EngineUnknown": 1}
