"""vLLM's own NixlConnector and ours, side by side: the time from prefill's answer to decode's first token, and the
calls that it takes. In vLLM's environment: `make bench-vllm`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvferry
from benchmarks.tables import Table
from kvferry_server.node.guard import Guard
from tests.support.node_servers import free_port
from tests.support.vllm_engines import PREFILL, Node, make_model, prompt, request
from tests.support.vllm_engines import kvferry as our_connector

LENGTHS = (64, 512, 1536)
REPEATS = 8
ROUNDS = 2
RESULTS = Path(__file__).parent / "RESULTS-vllm.md"

CALLS: Counter[str] = Counter()


@contextmanager
def counted() -> Iterator[None]:
    """Count the calls that node servers of this process get, by method."""
    original = Guard.intercept_service

    async def counting(self: Any, continuation: Any, details: Any) -> Any:
        CALLS[str(details.method).rpartition("/")[2]] += 1
        return await original(self, continuation, details)

    Guard.intercept_service = counting  # type: ignore[method-assign, assignment]
    yield
    Guard.intercept_service = original  # type: ignore[method-assign]


class Pair:
    """A prefill and a decode engine of one rank with one of the connectors."""

    def __init__(self, name: str, model: Path, folder: Path, address: str, round_: int) -> None:
        settings: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 2048}
        environments = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} for _ in range(2)]
        self.nodes = []
        for role, environment in zip(("kv_producer", "kv_consumer"), environments, strict=True):
            ours = our_connector(role, address)
            connector = ours if name == "kvferry" else {"kv_connector": "NixlConnector", "kv_role": role}
            log = folder / f"{name}-{role}-{round_}.log"
            self.nodes.append(Node(model, log, connector=connector, environment=environment, **settings))
        self.prefill, self.decode = (node.ready() for node in self.nodes)
        # An offline engine steps only while it generates, and our ranks register beside its first steps; one that
        # serves does so when it starts.
        for seed in range(2):
            for node in self.nodes:
                node.generate(request(prompt(seed, 32), 2))
            time.sleep(3)

    def first_token(self, seed: int, length: int) -> tuple[float, int]:
        """Seconds from prefill's answer to decode's first token, and the token."""
        tokens = prompt(seed, length)
        [answer] = self.prefill.generate(request(tokens, 1, PREFILL))
        began = time.perf_counter()
        [first] = self.decode.generate(request(tokens, 1, answer["params"]))
        took = time.perf_counter() - began
        if first["tokens"] != answer["tokens"]:
            raise RuntimeError(f"decode said {first['tokens']}, prefill {answer['tokens']}")
        return took, first["tokens"][0]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def main() -> None:
    """Measure, in turns, and write the table."""
    folder = Path(tempfile.mkdtemp())
    model = make_model(folder / "model", kv_heads=4, layers=16, head_dim=64)
    times: dict[tuple[str, int], list[float]] = {}
    first: dict[str, list[float]] = {}
    requests, calls = 0, Counter[str]()
    with counted(), kvferry.serve("127.0.0.1:0", unix="") as server:
        for round_ in range(ROUNDS):
            for name in ("NixlConnector", "kvferry"):
                pair = Pair(name, model, folder, server.address, round_)
                try:
                    first.setdefault(name, []).append(pair.first_token(99, LENGTHS[0])[0])
                    before = Counter(CALLS)
                    for length in LENGTHS:
                        for repeat in range(REPEATS):
                            took, _ = pair.first_token(1000 * length + repeat, length)
                            times.setdefault((name, length), []).append(took)
                    if name == "kvferry":
                        requests = REPEATS * len(LENGTHS)
                        calls = CALLS - before
                finally:
                    pair.close()
    rows = []
    size = 2 * 16 * 4 * 64 * 4
    for length in LENGTHS:
        theirs, ours = (times[name, length] for name in ("NixlConnector", "kvferry"))
        ratio = statistics.median(ours) / statistics.median(theirs)
        spread = f"{min(ours) / min(theirs):.2f}"
        rows.append((f"{length} tokens, {length * size >> 20} MiB", f"{ratio:.2f}", spread))
    ratio = statistics.median(first["kvferry"]) / statistics.median(first["NixlConnector"])
    rows.append((f"the first request, {LENGTHS[0]} tokens", f"{ratio:.2f}", "-"))
    title = "vLLM on CPU, TP1 to TP1: prefill's answer to decode's first token, kvferry's time in NixlConnector's"
    table = Table(title, ("prompt", "median", "fastest"), rows)
    said = ", ".join(f"{count / requests:.2f} {method}" for method, count in sorted(calls.items()))
    text = f"# vLLM side by side\n\nWritten by `make bench-vllm`.\n\n{table.markdown()}\n"
    text += f"Calls per request at the node server, both engines', over {requests} requests: {said}.\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
