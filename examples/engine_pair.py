"""A minimal engine pair: prefill on two ranks, decode on one, each a scheduler with workers in processes of their own.

What an engine has to do for kvferry is `Engine.step`; the rest stands for the engine. Its "model" writes into the cache
of each token a value that depends on all tokens before it, so that decode can tell whether it got the right one.

    python examples/engine_pair.py
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvferry
from kvferry import Blocks, EngineSpec, Group, Prompt
from kvferry.engine import Grant, SchedulerPort, WorkerPort
from kvferry.geometry import shard

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 4, 8, 16, 64
AXES = ("kv", "block", "head", "token", "content")
spawned = multiprocessing.get_context("spawn").Process


def cache_of(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """What the model leaves in the cache for each token, ``[tokens, heads, content]``."""
    running = np.cumsum(np.asarray(tokens, np.uint32) * np.uint32(2654435761), dtype=np.uint32)
    return running[:, None, None] + np.arange(HEADS * DIM, dtype=np.uint32).reshape(HEADS, DIM)


def worker(address: str, spec: EngineSpec, rank: int, token: str, pipe: Any) -> None:
    """A worker: its cache, its port, and the messages of its scheduler."""
    heads = shard(rank, spec.num_ranks, HEADS)
    held = slice(heads.begin, heads.end)
    caches = {f"layer{layer}": np.zeros((2, BLOCKS, len(heads), BLOCK, DIM), np.uint32) for layer in range(LAYERS)}
    with kvferry.Client(address) as client:
        port = WorkerPort(client, spec, rank, token=token)
        port.register(caches, axes=AXES, heads=heads, total_heads=HEADS)
        pipe.send("registered")
        while (message := pipe.recv()) is not None:
            starts, cancels, compute, look = message
            for grant in starts:
                port.start(grant)
            for read_id in cancels:
                port.cancel(read_id)
            seen = None
            for tokens, blocks in compute:
                for place, value in enumerate(cache_of(tokens)):
                    for cache in caches.values():
                        cache[:, blocks[place // BLOCK], :, place % BLOCK] = value[held]
            for tokens, blocks in look:
                wanted = cache_of(tokens)[:, held]
                found = [
                    np.stack([cache[:, blocks[t // BLOCK], :, t % BLOCK] for t in range(len(tokens))], axis=1)
                    for cache in caches.values()
                ]
                seen = all(bool((layer == wanted).all()) for layer in found)
            # Whatever engines do between their steps, the port's part of it is this one line.
            pipe.send((port.finished(), seen))


class Engine:
    """An engine: its scheduler's port here, its workers elsewhere, as `start` has them."""

    def __init__(
        self, client: kvferry.Client, address: str, name: str, ranks: int, start: Callable[..., Any] = spawned
    ) -> None:
        spec = EngineSpec(name, (Group("full", block_tokens=BLOCK, num_blocks=BLOCKS),), ranks, {"model": "example"})
        self.port = SchedulerPort(client, spec)
        self.pipes, self.workers, self.free = [], [], list(range(BLOCKS))
        for rank in range(ranks):
            mine, theirs = multiprocessing.Pipe()
            arguments = (address, spec, rank, str(self.port.token), theirs)
            self.workers.append(start(target=worker, args=arguments, daemon=True))
            self.workers[-1].start()
            self.pipes.append(mine)
        for pipe in self.pipes:
            pipe.recv()

    def step(self, starts: Sequence[Grant] = (), compute: Any = (), look: Any = ()) -> list[Any]:
        """One step: tell the workers, let them work, hear what they say."""
        message = (list(starts), self.port.cancels(), compute, look)
        for pipe in self.pipes:
            pipe.send(message)
        answers = [pipe.recv() for pipe in self.pipes]
        for output, _ in answers:
            self.port.collect(output)
        return [seen for _, seen in answers]

    def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        count = -(-tokens // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def close(self) -> None:
        """End the workers, then the session."""
        for pipe in self.pipes:
            pipe.send(None)
        self.port.close()
        for one in self.workers:
            one.join()
            if code := getattr(one, "exitcode", 0):
                raise SystemExit(f"a worker ended with exit code {code}")


def run(address: str, start: Callable[..., Any] = spawned) -> None:
    """One request, from prefill to decode and back to free blocks. `start` makes a worker: a process, or a thread."""
    prompt = list(range(100, 150))
    # Each engine makes it of the tokens that its own request has. Decode takes the cache of this prompt alone.
    asked = Prompt(prompt)
    with kvferry.Client(address) as client:
        prefill = Engine(client, address, "prefill", 2, start)
        decode = Engine(client, address, "decode", 1, start)

        # Prefill computes the prompt and offers its blocks: they are pinned until `released` names them.
        blocks = prefill.take(len(prompt))
        prefill.step(compute=[(prompt, blocks)])
        publication = prefill.port.publish("request-1", {"full": Blocks(blocks, end_token=len(prompt))}, prompt=asked)

        # The router carries `publication.reference`. Decode pins the blocks as soon as the request arrives ...
        decode.port.acquire("request-1", publication.reference, prompt=asked)
        while (granted := decode.port.granted("request-1")) is None:
            decode.step()
        print(f"granted: blocks {granted.blocks()['full'].ids.tolist()} of {granted.engine_id}")
        # ... and reads them as soon as it has blocks of its own, while it steps on.
        mine = decode.take(len(prompt))
        decode.step(starts=[decode.port.attach("request-1", {"full": Blocks(mine)}, (0, len(prompt)))])
        steps = 0
        while not (ended := decode.port.finished().reads):
            decode.step()
            steps += 1
        print(f"read: {ended[0].bytes} bytes, error: {ended[0].error}; the engine went on stepping: {steps > 0}")
        print(f"every token is right: {all(decode.step(look=[(prompt, mine)]))}")

        # Prefill hears that its blocks are free, exactly once.
        while not (released := prefill.port.released()):
            prefill.step()
        prefill.free += blocks
        print(f"released: {released[0].request_id}, {released[0].outcome.name}")
        prefill.close()
        decode.close()


if __name__ == "__main__":
    with kvferry.serve() as server:
        run(server.address)
