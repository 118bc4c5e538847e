"""The backend's manager with played ports, between which tests put real senders and receivers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll

from kvferry import Prompt, Release, router_reference
from kvferry._reads.cache_reads import ReadState
from kvferry.errors import KvferryError
from kvferry.integrations.sglang.bootstrap import Source, room_reference
from kvferry.integrations.sglang.manager import KvferryManager
from kvferry.integrations.sglang.metrics import counts_of
from kvferry.integrations.sglang.requests import KvferryReceiver

ROOM = 417
SOURCE = Source("prefill-0", "127.0.0.1:7300")
GIVEN = router_reference("127.0.0.1:7300", "vllm-0")
PROMPT = Prompt(range(30))


class PlayedRead:
    """A read of one rank."""

    error: KvferryError | None = None
    result: Any
    state = ReadState.READING
    ended = quiet = cancelled = False

    def done(self) -> bool:
        return self.ended

    def exception(self, timeout: float) -> KvferryError | None:
        return self.error

    def cancel(self) -> bool:
        self.cancelled = True
        return self.quiet


class PlayedManager(KvferryManager):
    """A manager whose ports are played: what they were told is in `told`."""

    def __init__(self, *, leader: bool = True) -> None:
        self.leader = leader
        self.told: list[str] = []
        self.asked: object = None
        self.names: list[str] = []
        self.prompts: list[Prompt] = []
        self.released: Release | None = None
        self.current = PlayedRead()
        self._reads: dict[int, Any] = {}
        self._requests = WeakValueDictionary()
        self._breathed = 0.0
        self._port = None
        self.kv_args = SimpleNamespace(state_types=[], page_size=16)
        self.pools: Any = SimpleNamespace(window="")
        self.aux: Any = SimpleNamespace(payload=lambda row, tokens: b"row")
        self.sources: Any = SimpleNamespace(get=lambda address: (SOURCE, ""), forget=lambda address: None)
        self.counts = counts_of(0)

    own_source = SOURCE

    @property
    def port(self) -> Any:
        return SimpleNamespace(abort=lambda publication: self.told.append("abort"))

    def publish(self, reference: str, name: str, blocks: Any, payload: bytes, prompt: Prompt) -> Any:
        self.told.append("publish")
        self.names.append(name)
        self.prompts.append(prompt)
        return SimpleNamespace(number=1)

    def take_release(self, publication: Any) -> Release | None:
        return self.released

    def read(self, reference: str, room: int, name: str, blocks: Any, tokens: Any, prompt: Prompt) -> Any:
        assert reference in (room_reference(SOURCE, ROOM), GIVEN)
        self.asked = tokens
        self.names.append(name)
        self.prompts.append(prompt)
        self._reads[room] = self.current
        return self.current

    def decline(self, reference: str, prompt: Prompt = Prompt.unknown) -> None:
        self.told.append("decline")


def reading(manager: PlayedManager) -> KvferryReceiver:
    receiver = KvferryReceiver(manager, "127.0.0.1:8998", ROOM)
    receiver.expect_prompt("decode's", 30, PROMPT)
    receiver.init(0)
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.send_metadata(np.array([3, 4]), 0, [], decode_prefix_len=0)
    assert receiver.poll() == KVPoll.Transferring
    return receiver
