"""Requests that a router has confused are refused by both of SGLang's sides, and leave prefix caches unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.sglang.bootstrap import room_name
from tests.support import sglang_lora
from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import PAGE, Instance, named, served, some_room
from tests.support.vllm_engines import prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

HOLD = 3
"""Seconds for which prefill keeps unread publications before it answers."""

ASKED, OTHER = prompt(0, 100), prompt(1, 100)
ONE_TOKEN = [*ASKED[:50], (ASKED[50] + 1) % 512, *ASKED[51:]]
PROMPTS = {
    "asked": ASKED,
    "other": OTHER,
    "one token": ONE_TOKEN,
    "longer": [*ASKED, *prompt(2, 50)],
    "a token longer": [*ASKED, 7],
    "shorter": ASKED[:70],
    "whole pages": ASKED[: 4 * PAGE],
    "a token shorter": ASKED[:-1],
    "shares a prefix with other": [*OTHER[:80], *prompt(3, 20)],
}


@dataclass
class Pair:
    """Two instances with prefix caches, and what one instance by itself says to `PROMPTS`, also with an adapter."""

    home: NodeServerProcess
    prefill: Instance
    decode: Instance
    alone: dict[str, list[int]]
    with_adapter: list[int]

    def confuse(self, rooms: list[int], computed: list[Any], wanted: list[Any]) -> list[Any]:
        """Ask prefill for some requests, and decode for others under the same rooms; returns decode's answers.
        Prefill's say that nobody has read them: they were not declined, since their own readers might have come."""
        with ThreadPoolExecutor(2 * len(rooms)) as pool:
            firsts = [
                pool.submit(self.prefill.generate, **given, rid=f"of-{asked['rid']}", **named(self.prefill, room))
                for room, given, asked in zip(rooms, computed, wanted, strict=True)
            ]
            answers = list(
                pool.map(lambda room, given: self.decode.generate(**given, **named(self.prefill, room)), rooms, wanted)
            )
            assert all("UNREAD" in str(first.result()) for first in firsts)
        until(lambda: pinned(self.home) == 0)
        return answers

    def check_refused(self, answer: Any, rid: str, room: int) -> None:
        """An answer is no tokens but the error's name. Beside SGLang's own line, which says the same, one of the log
        says whose fault it is, and names both requests."""
        assert "output_ids" not in answer
        assert "PromptMismatch" in str(answer)
        log = self.decode.log.read_text().splitlines()
        found = [line for line in log if rid in line and "PromptMismatch" in line]
        (line,) = (each for each in found if "Decode transfer failed" not in each)
        assert len(found) == 2
        assert "router" in line
        assert f"{room_name(room)} {rid}" in line
        assert f"{room_name(room)} of-{rid}" in line

    def check_right(self, *names: str) -> None:
        """Asked rightly, both say what one instance says, with what decode has in its prefix cache and without."""
        for _ in range(2):
            for name in names:
                answer = served(self.prefill, self.decode, some_room(), PROMPTS[name])
                assert answer["output_ids"] == self.alone[name]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("marks")
    adapters = {name: sglang_lora.make_adapter(folder / name, seed) for seed, name in enumerate(("sql", "chat"))}

    def start(mode: str, *more: str) -> Instance:
        more = (*sglang_lora.arguments(), *more)
        return Instance(
            model, folder / f"{mode}.log", mode, server.address, *more, environment=sglang_lora.environment()
        )

    def loaded(instance: Instance) -> Instance:
        instance.ready()
        for name, path in adapters.items():
            assert instance.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})["success"]
        return instance

    with NodeServerProcess(folder / "home", tcp=True, ttl=20, max_ttl=20, hold=HOLD) as server:
        instances = [
            start("null"),
            start("prefill"),
            start("decode", "--disaggregation-decode-enable-radix-cache", "--enable-metrics"),
        ]
        try:
            single, prefill, decode = map(loaded, instances)
            alone = {name: single.generate(tokens)["output_ids"] for name, tokens in PROMPTS.items()}
            with_adapter = single.generate(ASKED, lora_path="sql")["output_ids"]
            single.close()
            yield Pair(server, prefill, decode, alone, with_adapter)
            for instance in (prefill, decode):
                assert "leak" not in instance.log.read_text()
        finally:
            for instance in instances:
                instance.close()


def test_requests_with_swapped_rooms_are_both_refused(pair: Pair) -> None:
    """Afterwards both prompts, and one that shares pages with the second, are answered rightly."""
    before = pair.decode.counted("kvferry_reader_failures", reason="PromptMismatch")
    rooms = [some_room(), some_room()]
    computed = [{"prompt": ASKED}, {"prompt": OTHER}]
    wanted = [{"prompt": OTHER, "rid": "swapped-0"}, {"prompt": ASKED, "rid": "swapped-1"}]
    answers = pair.confuse(rooms, computed, wanted)
    for index, (answer, room) in enumerate(zip(answers, rooms, strict=True)):
        pair.check_refused(answer, f"swapped-{index}", room)
    assert pair.decode.counted("kvferry_reader_failures", reason="PromptMismatch") - before == 2
    pair.check_right("other", "asked", "shares a prefix with other")


@pytest.mark.parametrize("name", ["one token", "longer", "a token longer", "shorter", "whole pages", "a token shorter"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_prompt_that_differs_a_little_is_refused(pair: Pair, name: str, side: str) -> None:
    """On either side. What begins with the whole of prefill's prompt is no other prompt, but is not all there."""
    computed, wanted = (PROMPTS[name], ASKED) if side == "prefill" else (ASKED, PROMPTS[name])
    room, rid = some_room(), f"{name}-{side}".replace(" ", "-")
    if wanted[: len(computed)] == computed:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(pair.prefill.generate, computed, **named(pair.prefill, room))
            answer = pair.decode.generate(wanted, **named(pair.prefill, room))
            first.result()
        said = str(answer)
        assert f"a prompt of {len(computed)} tokens" in said or "BlocksShort" in said or "PromptMismatch" in said
    else:
        (answer,) = pair.confuse([room], [{"prompt": computed}], [{"prompt": wanted, "rid": rid}])
        pair.check_refused(answer, rid, room)
    pair.check_right(name, "asked")


def test_adapters_are_distinguished_by_their_names(pair: Pair) -> None:
    """Each instance knows an adapter by an id of its own."""
    for _ in range(2):
        answer = served(pair.prefill, pair.decode, some_room(), ASKED, lora_path="sql")
        assert answer["output_ids"] == pair.with_adapter != pair.alone["asked"]
    for index, (computed, wanted) in enumerate((("chat", "sql"), ("sql", None), (None, "sql"))):
        room, rid = some_room(), f"adapter-{index}"
        first, second = ({"prompt": ASKED, "lora_path": name} for name in (computed, wanted))
        (refused,) = pair.confuse([room], [first], [{**second, "rid": rid}])
        pair.check_refused(refused, rid, room)
        answer = served(pair.prefill, pair.decode, some_room(), ASKED, lora_path="sql")
        assert answer["output_ids"] == pair.with_adapter
    pair.check_right("asked")
