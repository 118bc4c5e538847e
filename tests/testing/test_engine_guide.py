"""The code of docs/engines.md runs as it is printed, and its tables are true."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSession, EngineSpec, Group, Prompt, Read, SchedulerPort, WorkerPort
from kvferry.aio import AsyncSchedulerPort, AsyncSession
from kvferry.errors import InvalidField, PublicationAborted
from kvferry.testing import Fabric
from tests.support.repository import ROOT
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON

PAGE = (ROOT / "docs" / "engines.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
IMPORTS = CODE[0]
AXES = ("kv", "block", "head", "token", "content")
BLOCK, BLOCKS = 16, 64


def guide(part: str, **names: Any) -> dict[str, Any]:
    """The names that the only block with `part` defines; `names` are the engine's own."""
    (block,) = [code for code in CODE if part in code]
    exec(IMPORTS + block, names)
    return names


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose heading begins with `first`."""
    table = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def numbered(*shape: int) -> Any:
    """A cache in which no element is 0, or like another."""
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


class Layers:
    """Two engines of the guide's three groups; the source's caches hold numbers, the destination's zeros."""

    def __init__(self, fabric: Fabric) -> None:
        self.shown = guide("GroupKind.STATE")
        groups = tuple(self.shown[name] for name in ("full", "window", "state"))
        shapes = [(2, BLOCKS, 2, BLOCK, 4)] * 2 + [(8, 2, 4)]
        self.theirs, self.mine = (
            [numbered(*shape) for shape in shapes],
            [np.zeros(shape, np.float32) for shape in shapes],
        )
        self.prefill, self.decode = (
            fabric.client().register_cache(
                EngineSpec(name, groups),
                tensors={f"layers.{number}": tensor for number, tensor in enumerate(tensors)},
                planes=self.shown["planes"](*tensors),
            )
            for name, tensors in (("p", self.theirs), ("d", self.mine))
        )


@pytest.mark.parametrize(("column", "tokens"), [(1, None), (1, (0, 40)), (2, (32, 40))])
def test_the_tokens_of_windows_and_states_move_as_the_table_says(
    fabric: Fabric, column: int, tokens: tuple[int, int] | None
) -> None:
    world = Layers(fabric)
    publication = world.prefill.session.publish("request", world.shown["theirs"])
    world.decode.read(publication.reference, world.shown["mine"], tokens=tokens).result(SOON)
    for row, source, found in zip(rows("group"), world.theirs, world.mine, strict=True):
        name = row[0].strip("`")
        given, own = world.shown["theirs"][name], world.shown["mine"][name]
        wanted = np.zeros_like(found)
        if name == "state":
            wanted[own.ids[0]] = source[given.ids[0]]
        else:
            first, last = map(int, re.findall(r"\d+", row[column]))
            for token in range(first, last + 1):
                block, slot = divmod(token, BLOCK)
                to = own.ids[block - own.first_token // BLOCK]
                wanted[:, to, :, slot] = source[:, given.ids[block], :, slot]
        assert np.array_equal(found, wanted), name


def test_windows_and_states_are_published_in_the_steps_of_the_table(fabric: Fabric) -> None:
    world = Layers(fabric)
    publication = world.prefill.session.publish("request", {}, last=False)
    early = {
        "full": Blocks([4], end_token=16),
        "window": Blocks([7], first_token=16, end_token=32),
        "state": Blocks([2], state_token=32),
    }
    for name, *_, step in rows("group"):
        name = name.strip("`")
        if step == "any":
            world.prefill.session.publish_more(publication, {name: early[name]}, last=False)
        else:
            assert step == "last"
            with pytest.raises(InvalidField, match="this is not the last step"):
                world.prefill.session.publish_more(publication, {name: early[name]}, last=False)


def test_a_step_that_does_not_continue_is_refused_and_loses_nothing(fabric: Fabric) -> None:
    world = Layers(fabric)
    session = world.prefill.session
    publication = session.publish("request", {"full": Blocks([4], end_token=16)}, last=False)
    for wrong in (Blocks([5], first_token=32, end_token=48), Blocks([5], first_token=16, end_token=30)):
        with pytest.raises(InvalidField, match=r"where the step before ended|this is not the last step"):
            session.publish_more(publication, {"full": wrong}, last=False)
    session.publish_more(publication, {"full": Blocks([5], first_token=16, end_token=32)}, last=False)
    assert [held.number for held in session.unreleased()] == [publication.number]


class Preempted:
    """A prefill engine that has published 32 of 48 tokens, and a reader that has them."""

    def __init__(self, fabric: Fabric) -> None:
        group = Group("full", block_tokens=BLOCK, num_blocks=BLOCKS)
        client, self.prompt = fabric.client(), Prompt(range(48))
        self.port = SchedulerPort(client, EngineSpec("p", (group,)))
        self.theirs, self.mine = numbered(2, BLOCKS, 1, BLOCK, 4), np.zeros((2, BLOCKS, 1, BLOCK, 4), np.float32)
        client.register_cache(self.port.spec, tensors={"layer": self.theirs}, axes=AXES)
        self.decode = fabric.client().register_cache(EngineSpec("d", (group,)), tensors={"layer": self.mine}, axes=AXES)
        self.publication = self.port.publish(
            "request", {"full": Blocks([1, 2], end_token=32)}, last=False, prompt=self.prompt
        )
        self.read = self.begin(self.publication.reference)
        until(lambda: bool(self.mine[:, 5].any()))
        self.shown = guide("def begin_again", port=self.port)

    def begin(self, reference: str) -> Any:
        blocks = {"full": Blocks([4, 5, 6])}
        return self.decode.read(reference, blocks, (0, 48), progressive=True, prompt=self.prompt)


def test_a_preempted_request_goes_on_in_its_publication(fabric: Fabric) -> None:
    world = Preempted(fabric)
    # Computed again in the blocks 7, 8 and 9, of which the last is new.
    world.shown["go_on"](world.publication, [7, 8, 9], 32, 48)
    world.read.result(SOON)
    assert np.array_equal(world.mine[:, [4, 5, 6]], world.theirs[:, [1, 2, 9]])


def test_a_preempted_request_begins_again_in_another_publication(fabric: Fabric) -> None:
    world = Preempted(fabric)
    again = world.shown["begin_again"](world.publication, "request", world.prompt)
    assert isinstance(world.read.exception(SOON), PublicationAborted)
    assert world.read.wait_quiet(SOON)
    assert again.number != world.publication.number
    read = world.begin(again.reference)
    world.port.publish_more(again, {"full": Blocks([7, 8, 9], end_token=48)}, last=True)
    read.result(SOON)
    assert np.array_equal(world.mine[:, [4, 5, 6]], world.theirs[:, [7, 8, 9]])


@pytest.mark.parametrize("fails", [False, True])
def test_an_asyncio_engine_of_several_processes_reads(fabric: Fabric, fails: bool) -> None:
    asyncio.run(asyncio.wait_for(several_processes(fabric, fails=fails), 60))


async def several_processes(fabric: Fabric, *, fails: bool) -> None:
    group = Group("full", block_tokens=BLOCK, num_blocks=BLOCKS)
    source = numbered(2, BLOCKS, 8, BLOCK, 4)
    prefill = await asyncio.to_thread(
        partial(
            fabric.client().register_cache,
            EngineSpec("p", (group,)),
            tensors={"layer": source},
            axes=AXES,
            heads=range(8),
            total_heads=8,
        )
    )
    shown, spec = guide("async def rank_process"), EngineSpec("d", (group,), num_ranks=2)
    memory = [np.zeros((2, BLOCKS, 4, BLOCK, 4), np.float32) for _ in range(2)]
    token: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    freed: asyncio.Queue[int] = asyncio.Queue()
    publication = await asyncio.to_thread(prefill.session.publish, "request", {"full": Blocks([1, 2])})
    back: list[list[int]] = []

    async def send(text: str) -> None:
        token.set_result(text)

    async def requests() -> AsyncIterator[tuple[str, str, list[int]]]:
        yield "read-1", publication.reference, [7, 3]

    address = fabric.address
    first = asyncio.create_task(shown["first_process"](address, spec, send, freed.put_nowait))
    if fails:
        fabric.fail_reads(2)
    ranks = [
        shown["rank_process"](address, spec, rank, await token, {"layer": memory[rank]}, AXES, requests(), back.append)
        for rank in range(2)
    ]
    await asyncio.gather(*ranks)
    first.cancel()
    if fails:
        assert back == [[7, 3]] * 2
    else:
        assert back == []
        for rank, own in enumerate(memory):
            assert np.array_equal(own[:, [7, 3]], source[:, [1, 2], 4 * rank : 4 * rank + 4])


def test_each_wait_of_the_table_exists() -> None:
    named: dict[str, list[tuple[type, type]]] = {
        "port": [(SchedulerPort, AsyncSchedulerPort), (WorkerPort, WorkerPort)],
        "session": [(EngineSession, AsyncSession)],
        "read": [(Read, Read)],
    }
    for _, *calls in rows("for"):
        for side, call in enumerate(calls):
            ((name, method),) = re.findall(r"(\w+)\.(\w+)\(", call)
            for kinds in named[name]:
                waits = getattr(kinds[side], method)
                assert inspect.iscoroutinefunction(waits) == call.startswith("`await"), call


def test_a_release_ends_no_wait_for_news(fabric: Fabric) -> None:
    world = Preempted(fabric)
    assert not world.port.wait_news(0.0)
    world.read.cancel()
    world.port.abort(world.publication)
    until(lambda: bool(world.port.released()))
    assert not world.port.wait_news(0.0)
