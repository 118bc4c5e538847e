"""Two engines whose workers come to be in one of several ways, and a read between them; prints "equal".

python -m tests.engine.startup engine fork|spawn|exec ADDRESS FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Client as Dial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from msgspec import msgpack

from kvferry import Blocks, Client, EngineSpec
from kvferry.engine import SchedulerPort, WorkerOutput
from tests.engine.port_engines import work
from tests.support.caches import Memory, Model, expect, kv, shards, write
from tests.support.identifiers import unique_id

MODEL = Model()
SOURCE_IDS, IDS, TOKENS = [3, 4, 9], [20, 7, 8], 40


def on_pipe(pipe: Any) -> None:
    """A worker that was forked or spawned: its job comes later, through the pipe."""
    work(pipe.recv(), pipe)


def start(method: str) -> Any:
    """Start a worker that waits for its job, before anything of kvferry is used here; the way to it."""
    if method == "exec":
        return None
    context: Any = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    context.Process(target=on_pipe, args=(theirs,), daemon=True).start()
    return mine


def dial(folder: Path, index: int, job: tuple[Any, ...]) -> Any:
    """A worker by a command of its own; it finds its token in its environment."""
    address = str(folder / f"worker-{index}")
    with Listener(address) as listener:
        environment = {**os.environ, "ENGINE_TOKEN": job[-2]}
        subprocess.Popen([sys.executable, "-m", "tests.engine.startup", "worker", address], env=environment)
        pipe = listener.accept()
    pipe.send((*job[:-2], job[-1]))
    return pipe


def worker(address: str) -> None:
    """The main of such a worker."""
    pipe: Any = Dial(address)
    received = pipe.recv()
    work((*received[:-1], os.environ["ENGINE_TOKEN"], received[-1]), pipe)


def engine(method: str, address: str, folder: Path) -> None:
    """Both engines, from their start to the bytes."""
    pipes = [start(method) for _ in range(2)]
    specs = [EngineSpec(unique_id(name), (MODEL.group(),), 1, {"model": "tiny"}) for name in ("p", "d")]
    units = shards(MODEL.heads, 1)[0]
    memories = [Memory(MODEL, units, folder / spec.engine_id) for spec in specs]
    with Client(address) as client:
        ports = [SchedulerPort(client, spec) for spec in specs]
        for index, (spec, memory, port) in enumerate(zip(specs, memories, ports, strict=True)):
            job: tuple[Any, ...] = (address, spec, 0, MODEL, units, str(memory.path), str(port.token), {})
            if pipes[index] is None:
                pipes[index] = dial(folder, index, job)
            else:
                pipes[index].send(job)
        for pipe in pipes:
            pipe.recv()
        values = kv(MODEL, 1, TOKENS)
        write(memories[0], values, SOURCE_IDS)
        publication = ports[0].publish("r", {"full": Blocks(SOURCE_IDS, end_token=TOKENS)})
        ports[1].acquire("r", publication.reference)
        while ports[1].granted("r") is None:
            pass
        grant = ports[1].attach("r", {"full": Blocks(IDS)})
        pipes[1].send(("start", (msgpack.encode(grant), "keep")))
        pipes[1].recv()
        reads: Any = ()
        while not reads:
            pipes[1].send(("finished", ()))
            ports[1].collect(msgpack.decode(pipes[1].recv(), type=WorkerOutput))
            reads = ports[1].finished().reads
        equal = bool((memories[1].cells == expect(memories[1], values, IDS, (0, TOKENS))).all())
        print("equal" if reads[0].error is None and equal else reads)
        for pipe in pipes:
            pipe.send(("end", ()))
        for port in ports:
            port.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        engine(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
