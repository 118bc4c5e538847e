"""vLLM's own NixlConnector and ours, side by side: the time from prefill's answer to decode's first token.

In vLLM's environment: `make bench-vllm`. The engines of both connectors live at the same time, and requests alternate
between them. While one pair is measured, the processes of the other are stopped: an idle NixlConnector keeps a core
busy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import Table
from benchmarks.vllm_goals import FIRST, OURS, SAMPLES, THEIRS
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.vllm_engines import PREFILL, Node, make_model, prompt, request
from tests.support.vllm_engines import kvferry as our_connector

LENGTHS = (64, 512, 1536)
REPEATS = 12
STARTS = 3
TOKEN_BYTES = 2 * 16 * 4 * 64 * 4
"""Bytes of a token in the cache of the model: K and V, layers, heads, their size, float32."""

RESULTS = Path(__file__).parent / "RESULTS-vllm.md"


class Pair:
    """A prefill and a decode engine with one of the connectors.

    Args:
        name: of the connector.
        model: folder of the model.
        folder: for the engines' logs.
        address: of kvferry's node server.
        tp: the prefill engine's tensor-parallel size; that of decode is 1.
        chunk: how many tokens prefill computes at a time.
    """

    def __init__(self, name: str, model: Path, folder: Path, address: str, tp: int, *, chunk: int = 2048) -> None:
        self.name = name
        self.engine_id = f"{folder.name}-prefill"
        self.nodes = []
        for role, size, batched in (("kv_producer", tp, chunk), ("kv_consumer", 1, 2048)):
            settings: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": batched}
            named = {"engine_id": self.engine_id} if role == "kv_producer" else {}
            connector = our_connector(role, address, **named)
            if name == THEIRS:
                connector = {"kv_connector": THEIRS, "kv_role": role}
            log = folder / f"{name}-{role}.log"
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            self.nodes.append(Node(model, log, tp=size, connector=connector, environment=port, **settings))
        self.prefill, self.decode = self.nodes

    def ready(self) -> None:
        """Wait until both serve, and have computed something."""
        for node in self.nodes:
            node.ready()
        # An offline engine steps only while it generates, and our ranks register beside its first steps; one that
        # serves does so when it starts.
        for seed in range(2):
            for node in self.nodes:
                node.generate(request(prompt(seed, 32), 2))
            time.sleep(1)

    def first_token(self, seed: int, length: int) -> float:
        """Return the seconds from prefill's answer to decode's first token; raises `RuntimeError` if that is not the
        one that prefill has computed."""
        tokens = prompt(seed, length)
        [answer] = self.prefill.generate(request(tokens, 1, PREFILL))
        began = time.perf_counter()
        [first] = self.decode.generate(request(tokens, 1, answer["params"]))
        took = time.perf_counter() - began
        if first["tokens"] != answer["tokens"]:
            raise RuntimeError(f"{self.name}: decode said {first['tokens']}, prefill {answer['tokens']}")
        return took

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of both engines."""
        for node in self.nodes:
            os.killpg(node.process.pid, number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all processes of both engines for the block."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Times:
    """What was measured, by connector and what was asked."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, list[float]]] = {}

    def add(self, what: str, name: str, seconds: float) -> None:
        """Add a measurement."""
        self.all.setdefault(what, {}).setdefault(name, []).append(seconds)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the ratios of ours to theirs: of medians, of the fastest, and the quartiles of both in theirs."""
        rows = []
        for what, found in self.all.items():
            theirs, ours = found[THEIRS], found[OURS]
            unit = statistics.median(theirs)
            cells = [f"{statistics.median(ours) / unit:.2f}", f"{min(ours) / min(theirs):.2f}"]
            for times in (ours, theirs):
                low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
                cells.append(f"{low / unit:.2f} to {high / unit:.2f}")
            rows.append((what, cells[0], cells[1], cells[2], cells[3]))
        return rows


def measure(times: Times, pairs: list[Pair], tp: int, lengths: tuple[int, ...], repeats: int) -> None:
    """Measure the first request of both pairs, then requests in turns."""
    one, other = pairs
    turns = ((one, other), (other, one))

    def take(what: str, seed: int, length: int) -> None:
        for pair, idle in turns:
            with idle.stopped():
                times.add(what, pair.name, pair.first_token(seed, length))

    take(f"TP {tp} to 1, {FIRST}, {lengths[0]} tokens", 99, lengths[0])
    for repeat in range(repeats):
        for length in lengths:
            what = f"TP {tp} to 1, {length} tokens, {length * TOKEN_BYTES >> 20} MiB"
            take(what, 1000 * length + repeat, length)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2], help="tensor-parallel sizes of prefill")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="requests of each length and start")
    parser.add_argument("--starts", type=int, default=STARTS, help="how often engines are started, for first requests")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = make_model(folder / "model", kv_heads=4, layers=16, head_dim=64)
    times = Times()
    load = os.getloadavg()[0]
    for tp in arguments.tp:
        for start in range(arguments.starts):
            logs = folder / f"{tp}-{start}"
            logs.mkdir()
            with NodeServerProcess(logs) as server, ExitStack() as stack:
                pairs = []
                for name in (THEIRS, OURS):
                    pair = Pair(name, model, logs, server.address, tp)
                    stack.callback(pair.close)
                    pair.ready()
                    pairs.append(pair)
                measure(times, pairs, tp, LENGTHS, arguments.repeats)
    columns = ("request", "median", "fastest", "quartiles", "quartiles of theirs")
    title = "vLLM on CPU: prefill's answer to decode's first token, in NixlConnector's median (fastest: in its fastest)"
    text = f"# vLLM side by side\n\nWritten by `make bench-vllm`. {arguments.starts} starts of the engines, "
    text += f"{arguments.repeats} requests of each length after each; load before: {load:.1f}.\n\n"
    text += Table(title, columns, times.rows()).markdown()
    RESULTS.write_text(text)
    SAMPLES.write_text(json.dumps(times.all, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
