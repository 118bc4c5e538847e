"""Prompts of SGLang's requests, and the ends of reads of another prompt."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, Req
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.sampling.sampling_params import SamplingParams

from kvferry import Prompt
from kvferry._reads.cache_reads import ReadState
from kvferry.errors import EngineUnknown, KvferryError, PromptMismatch
from kvferry.integrations.sglang.bootstrap import room_name
from kvferry.integrations.sglang.hooks import prompt_of, tell_receiver, tell_sender
from kvferry.integrations.sglang.requests import KvferryReceiver, KvferrySender
from tests.integrations.sglang.played import GIVEN, PROMPT, ROOM, PlayedManager, reading

TOKENS = list(range(7, 47))
KEY = bytes(range(16))


def asked(tokens: list[int], **more: Any) -> Req:
    return Req("r", "", array("q", tokens), SamplingParams(), **more)


def told(tokens: list[int], names: dict[str, str] | None = None, **more: Any) -> Prompt:
    """The prompt of a request, as an instance sees it that knows its adapters by these ids."""
    table = KvEventLoraNames()
    for lora_id, name in (names or {}).items():
        table.register(lora_id=lora_id, lora_name=name)
    return prompt_of(asked(tokens, **more), SimpleNamespace(kv_event_lora_names=table))


def image(content: int, length: int) -> list[int]:
    """The ids that SGLang writes in place of an image's tokens."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=np.full(12, content, np.float32))
    item.set_pad_value()
    return list(item.padding_sequence(length))


def test_marks_of_text_are_those_of_every_engine() -> None:
    found = told(TOKENS)
    assert found.mark(KEY, 40) == Prompt(TOKENS).mark(KEY, 40)
    assert found.mark(KEY, 40) != told([*TOKENS[:-1], 3]).mark(KEY, 40)


def test_adapter_is_identified_by_name_and_not_by_an_instances_id() -> None:
    here, there = "0" * 32, "1" * 32
    found = told(TOKENS, {here: "sql", there: "chat"}, lora_id=here)
    assert found.mark(KEY, 40) == Prompt(TOKENS, adapter="sql").mark(KEY, 40)
    assert found.mark(KEY, 40) == told(TOKENS, {here: "chat", there: "sql"}, lora_id=there, extra_key="x").mark(KEY, 40)
    assert found.mark(KEY, 40) != told(TOKENS, {here: "chat"}, lora_id=here).mark(KEY, 40)
    assert not told(TOKENS, {}, lora_id=here)


def test_prompt_of_embeddings_is_unknown() -> None:
    assert not told([1, 1], input_embeds=[[0.5], [0.25]])
    assert not told(TOKENS, positional_embed_overrides=object())


def test_images_are_distinguished_by_their_content() -> None:
    def of(*contents: int) -> bytes:
        first, second = contents
        tokens = [5, *image(first, 9), 6, *image(second, 4), 7]
        return told(tokens).mark(KEY, len(tokens))

    assert len({of(1, 2), of(2, 1), of(1, 3), of(1, 1)}) == 4
    assert of(1, 2) == of(1, 2)
    # An instance of another release of kvferry makes the same.
    assert told([5, *image(1, 2), 7]).token_ids.tolist() == [5, 0, 0, 7]


def test_prompt_is_known_up_to_the_first_image_without_a_hash() -> None:
    with envs.SGLANG_MM_SKIP_COMPUTE_HASH.override(True):
        found = told([5, 6, *image(1, 9), 7])
        assert (found.known, len(found)) == (2, 12)
        assert found.mark(KEY, 2) == Prompt([5, 6]).mark(KEY, 2)
        assert told([*image(1, 9), 7]).known == 0


@pytest.mark.parametrize("token", [-1, -(2**62), 2**32, 2**63 - 1])
def test_prompt_takes_any_token_id(token: int) -> None:
    assert told([5, token]).mark(KEY, 2) != told([5, 0]).mark(KEY, 2)


def test_senders_and_receivers_of_other_backends_receive_no_prompt() -> None:
    """SGLang's own sender for health checks, and a request that is too long for a sender."""
    request = asked(TOKENS)
    tell_sender(False, None, request)
    request.disagg_kv_sender = object()
    tell_sender(True, None, request)
    tell_receiver(SimpleNamespace(kv_receiver=object()), None, request)


def test_sender_and_receiver_hand_over_the_prompt_of_sglang() -> None:
    """Under the names by which they know the request, whatever ids a client chooses."""
    manager = PlayedManager()
    sender = KvferrySender(manager, "127.0.0.1:8998", ROOM)
    sender.expect_prompt("prefill's\n" + "x" * 1000, PROMPT)
    sender.init(1, 0)
    sender.send(np.array([3]), [], num_kv_tokens=30)
    sender.clear()
    reading(manager)
    assert manager.prompts == [PROMPT, PROMPT]
    at_prefill, at_decode = manager.names
    assert at_prefill.startswith(f"{room_name(ROOM)} prefill's\\nxxx")
    assert len(at_prefill) < 256
    assert at_decode == f"{room_name(ROOM)} decode's"


@pytest.mark.parametrize("address", ["127.0.0.1:8998", f"{GIVEN}:1"])
@pytest.mark.parametrize("at_once", [True, False])
def test_publication_of_another_prompt_is_not_declined(
    address: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publication's own reader may still come. The reference's marks may show the other prompt before any call."""
    manager = PlayedManager()
    mismatch = PromptMismatch("it is of another prompt")
    receiver = KvferryReceiver(manager, address, ROOM)
    receiver.expect_prompt("r", 30, PROMPT)
    receiver.init(0)
    receiver.poll()
    if at_once:

        def refuse(*_: Any) -> Any:
            raise mismatch

        monkeypatch.setattr(manager, "read", refuse)
    receiver.send_metadata(np.array([3, 4]), 0, [], decode_prefix_len=0)
    manager.current.error, manager.current.ended = mismatch, True
    assert receiver.poll() == KVPoll.Failed
    receiver.ensure_abort_notified(force_arm=True)
    with pytest.raises(Exception, match="PromptMismatch"):
        receiver.failure_exception()
    receiver.abort()
    assert manager.told == []


@pytest.mark.parametrize(
    ("state", "error", "declined"),
    [
        (ReadState.WAITING, None, False),
        (ReadState.FAILED, PromptMismatch("it is of another prompt"), False),
        (ReadState.FAILED, EngineUnknown("it has ended"), True),
        (ReadState.READING, None, True),
    ],
)
def test_rank_declines_after_another_ranks_failure_only_its_own_prompt(
    state: ReadState, error: KvferryError | None, declined: bool
) -> None:
    """The other rank may have found out that it is of another prompt, and this one may know that since it was polled,
    or not yet."""
    manager = PlayedManager()
    receiver = reading(manager)
    manager.current.state, manager.current.error = state, error
    receiver.ensure_abort_notified(force_arm=True)
    assert manager.current.cancelled
    assert manager.told == ["decline"] * declined
