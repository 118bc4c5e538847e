"""A process with one of each public object, which forks: what each says in the child, while the parent goes on reading.

Run by `test_forks.py`, with the address of a node server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvferry
import kvferry.aio
import kvferry.engine
from kvferry import AsyncClient, Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion
from kvferry._cache import runtime_of
from kvferry._embed import EmbeddedServer
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import ForkedClient
from tests.support.caches import Model
from tests.support.identifiers import unique_id

MODEL = Model()
UNITS = Interval(0, MODEL.heads)
READS = 20


class Rank:
    """Memory of one rank, and what `register_cache` takes of it."""

    def __init__(self, name: str) -> None:
        self.cells = np.zeros(MODEL.rank_bytes(UNITS), np.uint8)
        base = self.cells.ctypes.data
        self.spec = EngineSpec(unique_id(name), (MODEL.group(),))
        self.memory: dict[str, Any] = {
            "planes": MODEL.planes(UNITS, base),
            "regions": [MemoryRegion(MemoryKind.DRAM, 0, base, self.cells.nbytes)],
            "keep": self.cells,
        }


def public_classes() -> set[type]:
    """Classes of the package's modules for users that are no values: of those a child may make its own."""
    found: set[type] = {EmbeddedServer}
    for module in (kvferry, kvferry.engine, kvferry.aio):
        for name in getattr(module, "__all__", vars(module)):
            member = getattr(module, name)
            if not name.startswith("_") and inspect.isclass(member) and member.__module__.startswith(module.__name__):
                found.add(member)
    values = {found_class for found_class in found if is_value(found_class)}
    return found - values


def is_value(cls: type) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, dict)
        or issubclass(cls, (enum.Enum, Exception))
        or cls in (kvferry.Blocks, kvferry.Prompt, kvferry.geometry.model.Group)
    )


def members(made: Any) -> Iterator[tuple[str, bool]]:
    """Names of the public methods and properties of an object, and whether it is a method."""
    for name, member in inspect.getmembers_static(type(made)) if sys.version_info >= (3, 11) else static(type(made)):
        public = not name.startswith("_") or name in ("__enter__", "__aenter__", "__await__")
        if public and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, inspect.isfunction(member)


def static(cls: type) -> list[tuple[str, Any]]:
    return [(name, inspect.getattr_static(cls, name)) for name in dir(cls)]


def wrong_in_child(made: dict[type, Any]) -> list[str]:
    """Return the calls that do not raise `ForkedClient`, and the closing calls that have an effect."""
    wrong = []
    for cls, each in made.items():
        for name, method in members(each):
            try:
                answer = getattr(each, name)() if method else getattr(each, name)
                if inspect.iscoroutine(answer):
                    try:
                        answer.send(None)
                    except StopIteration as stopped:
                        answer = stopped.value
                if name != "close" or answer is not None:
                    wrong.append(f"{cls.__name__}.{name} answered {answer!r}")
            except ForkedClient as error:
                if name == "close" or str(os.getppid()) not in str(error):
                    wrong.append(f"{cls.__name__}.{name}: {error}")
            except BaseException as error:
                wrong.append(f"{cls.__name__}.{name} raised {error!r}")
        for leave in ("__exit__", "__del__"):
            if hasattr(each, leave):
                getattr(each, leave)(*([None] * 3 if leave == "__exit__" else []))
    return wrong


def main(address: str) -> int:
    source, destination, ported, workers = (Rank(name) for name in ("source", "destination", "ported", "async"))
    server = kvferry.serve("127.0.0.1:0")
    client = Client(address)
    sources = client.register_cache(source.spec, **source.memory)
    reader = client.register_cache(destination.spec, **destination.memory)
    scheduler = SchedulerPort(client, ported.spec)
    worker = WorkerPort(client, ported.spec)
    worker.register(**ported.memory)
    loop = asyncio.new_event_loop()
    async_client = AsyncClient(address)
    async_cache = loop.run_until_complete(async_client.register_cache(workers.spec, **workers.memory))
    waiting = unpublished(sources.session.publish("to be aborted", {"full": Blocks([9])}, last=False).reference, reader)
    made: dict[type, Any] = {
        Client: client,
        kvferry.Cache: reader,
        kvferry.EngineSession: sources.session,
        kvferry.Read: waiting,
        SchedulerPort: scheduler,
        WorkerPort: worker,
        AsyncClient: async_client,
        kvferry.aio.AsyncCache: async_cache,
        kvferry.aio.AsyncSession: kvferry.aio.AsyncSession(sources.session),
        kvferry.aio.AsyncSchedulerPort: kvferry.aio.AsyncSchedulerPort(scheduler),
        EmbeddedServer: server,
        kvferry.Directory: kvferry.open_directory("file:/nowhere.json"),
    }
    # Objects that public ones give, beside those that the package exports.
    extra = [
        runtime_of(reader).shares,
    ]
    if public_classes() != set(made):
        print("not made:", public_classes() ^ set(made))
        return 2
    made |= {type(each): each for each in extra}

    failures: list[BaseException] = []

    def read_on() -> None:
        try:
            for number in range(READS):
                source.cells[:] = number + 1
                publication = sources.session.publish(f"request {number}", {"full": Blocks([1, 2])})
                reader.read(publication.reference, {"full": Blocks([3, 4])}).result(30)
                block = destination.cells.reshape(4, MODEL.num_blocks, -1)[0, 3]
                assert (block == number + 1).all()
        except BaseException as error:
            failures.append(error)

    read_on()
    thread = threading.Thread(target=read_on)
    thread.start()
    child = os.fork()
    if child == 0:
        wrong = wrong_in_child(made)
        print(*wrong, sep="\n", flush=True)
        # Not `sys.exit`: the parent's other thread may have been inside of NIXL, whose destructors would wait for it.
        os._exit(1 if wrong else 0)
    _, status = os.waitpid(child, 0)
    thread.join()
    read_on()
    waiting.cancel()
    loop.run_until_complete(async_client.close())
    loop.close()
    scheduler.close()
    client.close()
    server.close()
    if failures:
        raise failures[0]
    return os.waitstatus_to_exitcode(status)


def unpublished(reference: str, reader: kvferry.Cache) -> kvferry.Read:
    """A read that waits."""
    return reader.read(reference, {"full": Blocks([9])})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
