"""What it gains to fetch the beginning of a prompt from another engine's prefix cache: the time to first token.

In vLLM's environment, of vLLM 0.32 or newer: `make bench-vllm`. Another engine has the first 1,408 tokens of a prompt
of 1,500 in its prefix cache. Three ways are measured in turns, each prompt in all of them, on the same engine:

- computed: the engine computes the whole prompt.
- fetched: kvferry reads what the other engine has, and the rest is computed.
- in its own cache: the engine has the same beginning in its own prefix cache. This is what no fetch can fall below.

Before each, the engine forgets its prefix cache. How many tokens were cached is verified, and each first token is
compared with the one computed. The model is that of `benchmarks.vllm_pd`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.tables import Table
from benchmarks.vllm_pd import TOKEN_BYTES
from benchmarks.vllm_prefix_goals import COMPUTED, FETCHED, OWN, SAMPLES, Samples, verdict
from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request

LENGTH, PREFIX = 1500, 1408
REPEATS = 30

RESULTS = Path(__file__).parent / "RESULTS-vllm-prefix.md"

WAYS = (COMPUTED, FETCHED, OWN)
CACHED = {COMPUTED: 0, FETCHED: PREFIX, OWN: PREFIX}
"""Tokens that the engine does not compute, by way."""

P2P_TIER = (
    "vLLM's own P2P tier is not in the table, because it does not run on CPU: it moves what its tier in host memory "
    "has, and that tier of vLLM 0.32 refuses to start without a GPU (`CPU Offloading is currently only supported on "
    "CUDA-alike and XPU GPUs`)."
)


def first_token(source: Node, reader: Node, tokens: list[int], way: str) -> tuple[float, int]:
    """Return the seconds to the reader's first token, and the token.

    Raises:
        RuntimeError: the reader keeps its prefix cache, or finds more or less of the prompt than this way gives it.
    """
    [answer] = source.generate(request(tokens[:PREFIX], 1, {PREFIX_SOURCE: None}))
    if not reader.call("reset_prefix_cache"):
        raise RuntimeError("the reader does not forget its prefix cache")
    if way == OWN:
        reader.generate(request(tokens[:PREFIX], 1))
    asked = request(tokens, 1, {PREFIX_SOURCE: answer["params"][PREFIX_SOURCE]} if way == FETCHED else None)
    began = time.perf_counter()
    [first] = reader.generate(asked)
    took = time.perf_counter() - began
    if first["cached"] != CACHED[way]:
        raise RuntimeError(f"{way}: {first['cached']} tokens were cached, not {CACHED[way]}")
    [token] = first["tokens"]
    return took, token


def measure(source: Node, reader: Node, repeats: int) -> Samples:
    """Return the seconds of each way. Raises `RuntimeError` if one says another first token than the one computed."""
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(repeats + 1):
        tokens = prompt(number, LENGTH)
        turn = number % len(WAYS)
        found = {way: first_token(source, reader, tokens, way) for way in WAYS[turn:] + WAYS[:turn]}
        said = {way: token for way, (_, token) in found.items()}
        if len(set(said.values())) > 1:
            raise RuntimeError(f"prompt {number}: the first tokens differ: {said}")
        # The first prompt connects the engines.
        if number:
            for way, (took, _) in found.items():
                samples[way].append(took)
    return samples


def table(samples: Samples) -> Table:
    """Return the medians, quartiles and fastest, in milliseconds and in the median of computed."""
    unit = statistics.median(samples[COMPUTED])
    rows = []
    for way in WAYS:
        taken = samples[way]
        low, middle, high = statistics.quantiles(taken, n=4)
        quartiles = f"{low / unit:.2f} to {high / unit:.2f}"
        fastest = min(taken) / min(samples[COMPUTED])
        rows.append((way, f"{1000 * middle:.0f}", f"{middle / unit:.2f}", quartiles, f"{fastest:.2f}"))
    title = "Time to first token, in the median of computed (fastest: in its fastest)"
    return Table(title, ("prefix", "median, ms", "median", "quartiles", "fastest"), rows)


def report(samples: Samples, busy: float) -> str:
    """Return the page of results.

    Args:
        samples: what was measured.
        busy: the machine's load before.
    """
    return (
        "# vLLM, a prefix that another engine has\n\n"
        f"Written by `make bench-vllm`: prompts of {LENGTH:,} tokens whose first {PREFIX:,} another engine has in its "
        f"prefix cache ({PREFIX * TOKEN_BYTES >> 20} MiB), on one host and CPU, TP 1, blocks of 32 tokens. "
        f"{len(samples[COMPUTED])} prompts, each in all ways, in turns; load before: {busy:.1f}. The first tokens of "
        f"each prompt were the same.\n\n{verdict(samples)}\n\n{P2P_TIER}\n\n{table(samples).markdown()}"
    )


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="prompts, at least 2")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = make_model(folder / "model", kv_heads=4, layers=16, head_dim=64)
    before = os.getloadavg()[0]
    with NodeServerProcess(folder / "home") as server, ExitStack() as stack:
        nodes = []
        # The source steps by itself, as in a server: it answers while nobody asks it to generate.
        by_itself = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        for name, role, environment in (("source", "kv_both", by_itself), ("reader", "kv_consumer", {})):
            connector = kvferry(role, server.address)
            # A late answer is measured as such, instead of ending the run.
            connector["kv_connector_extra_config"]["prefix_wait"] = 2.0
            log, memory = folder / f"{name}.log", 256 << 20
            nodes.append(Node(model, log, connector=connector, environment=environment, kv_cache_memory_bytes=memory))
            stack.callback(nodes[-1].close)
        source, reader = (node.ready() for node in nodes)
        samples = measure(source, reader, arguments.repeats)
    text = report(samples, before)
    RESULTS.write_text(text)
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
