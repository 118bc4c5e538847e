"""What a router gains that sends requests to prefill and decode at the same time: the time from prefill's last token to
decode's first, by the length of the prompt.

In vLLM's environment: `make bench-vllm`. Prefill computes prompts in chunks. Three ways are measured in turns:

- in parts: kvferry, both engines asked at once under a router's reference. Decode reads each chunk when it is computed.
- whole: kvferry, decode asked after prefill has answered.
- NixlConnector: the same, with vLLM's own connector.

Decode's first token takes a step of vLLM, and attention over a longer prompt takes longer, however its blocks have come
there. So a step of decode is measured too, with blocks of the same prompt that it finds in its own prefix cache. The
model's weights are ten times as large as the cache of the longest prompt, as those of Qwen3-8B are at 11,000 tokens: in
a model of small weights the step would be little but attention.
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
from benchmarks.vllm_concurrent_goals import PARTS, SAMPLES, STEP, WHOLE, Samples, grown_without_step, load, verdict
from benchmarks.vllm_goals import OURS, THEIRS
from benchmarks.vllm_pd import Pair
from kvferry import router_reference
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import PREFILL, make_model, prompt, request

CHUNKS = (1, 2, 4, 8, 16, 32)
CHUNK = 64
"""Tokens of a chunk: prefill's `max_num_batched_tokens`."""
REPEATS = 15
STEPS = 16
"""Steps of decode whose mean is taken."""
BLOCK = 32
"""Tokens of a block of both engines."""
KV_HEADS, LAYERS, HEAD_DIM = 2, 16, 64
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
"""Bytes of a token in the cache of the model: K and V, layers, heads, their size, float32."""

ATTENTION = (
    "The model's weights are ten times as large as the cache of the longest prompt. Where they are small, the step is "
    "little but attention: in a model whose weights were a quarter of that cache, 32 chunks took 1.60 of one, and the "
    "step alone 1.83 (revision a02f262)."
)
"""What the model decides."""

RESULTS = Path(__file__).parent / "RESULTS-vllm-concurrent.md"

WAYS = (PARTS, WHOLE, THEIRS)


def in_parts(pair: Pair, address: str, tokens: list[int]) -> float:
    """Ask both engines at once; return the seconds from prefill's answer to decode's first token. Raises `RuntimeError`
    if that is not the one that prefill has computed."""
    reference = {"kvferry_reference": router_reference(address, pair.engine_id)}
    theirs = {"do_remote_prefill": True, "do_remote_decode": False, **reference}
    pair.decode.send("generate", request(tokens, 1, theirs))
    [answer] = pair.prefill.generate(request(tokens, 1, {**PREFILL, **reference}))
    began = time.perf_counter()
    [first] = pair.decode.answer()
    took = time.perf_counter() - began
    if first["tokens"] != answer["tokens"]:
        raise RuntimeError(f"decode said {first['tokens']}, prefill {answer['tokens']}")
    return took


def own_step(pair: Pair, tokens: list[int]) -> float:
    """Return the seconds of one of decode's steps after a prompt that it has read, less at most the last block. Raises
    `RuntimeError` if that is not in its prefix cache."""
    # One token is left for vLLM to compute.
    cached = (len(tokens) - 1) // BLOCK * BLOCK
    took = []
    for steps in (1, 1 + STEPS):
        began = time.perf_counter()
        [answer] = pair.decode.generate(request(tokens[: cached + 1], steps))
        took.append(time.perf_counter() - began)
        if answer["cached"] != cached:
            raise RuntimeError(f"decode found {answer['cached']} of {cached} tokens in its prefix cache")
    return (took[1] - took[0]) / STEPS


def measure(samples: dict[str, dict[int, list[float]]], pairs: dict[str, Pair], address: str, repeats: int) -> None:
    """Measure prompts of each length in turns, each way with a prompt of its own."""
    for repeat in range(repeats):
        for chunks in CHUNKS:
            # Decode generates a token more, and vLLM's limit is that of 32 chunks.
            length = chunks * CHUNK - 1
            for number, way in enumerate(WAYS[repeat % 3 :] + WAYS[: repeat % 3]):
                seed = 10000 * chunks + 10 * repeat + number
                pair = pairs[way]
                others = [other for other in set(pairs.values()) if other is not pair]
                with ExitStack() as stack:
                    for other in others:
                        stack.enter_context(other.stopped())
                    # Engines that were stopped until now answer their next request late.
                    pair.first_token(seed + 5, CHUNK)
                    if way == PARTS:
                        took = in_parts(pair, address, prompt(seed, length))
                        samples[STEP].setdefault(chunks, []).append(own_step(pair, prompt(seed, length)))
                    else:
                        took = pair.first_token(seed, length)
                samples[way].setdefault(chunks, []).append(took)


def table(samples: Samples) -> Table:
    """Return the medians: of both in NixlConnector's for the same prompt, and of each in its own for one chunk."""
    middle = {
        way: {chunks: statistics.median(taken) for chunks, taken in found.items()} for way, found in samples.items()
    }
    rows = []
    for chunks in middle[THEIRS]:
        size = chunks * CHUNK * TOKEN_BYTES >> 20
        against = [f"{middle[way][chunks] / middle[THEIRS][chunks]:.2f}" for way in (PARTS, WHOLE)]
        grown = [f"{middle[way][chunks] / middle[way][1]:.2f}" for way in WAYS]
        low, _, high = statistics.quantiles(samples[PARTS][chunks], n=4)
        quartiles = f"{low / middle[PARTS][1]:.2f} to {high / middle[PARTS][1]:.2f}"
        step = f"{middle[STEP][chunks] / middle[STEP][1]:.2f}"
        without = f"{grown_without_step(samples, chunks):.2f}"
        rows.append((f"{chunks} ({size} MiB)", *against, *grown, quartiles, step, without))
    columns = (
        "chunks",
        "in parts",
        "whole",
        "in parts",
        "whole",
        THEIRS,
        "in parts, quartiles",
        STEP,
        "in parts without the step",
    )
    title = f"Medians: the first two in {THEIRS}'s of the same prompt, the others in their own of one chunk"
    return Table(title, columns, rows)


def report(samples: Samples, busy: float) -> str:
    """Return the page of results.

    Args:
        samples: what was measured.
        busy: the machine's load before.
    """
    return (
        "# vLLM, prefill and decode asked at the same time\n\n"
        "Written by `make bench-vllm`: from prefill's answer to decode's first token, on CPU, TP 1. Prefill computes "
        f"{CHUNK} tokens at a time. {len(samples[THEIRS][1])} requests of each kind, in turns; load before: "
        f"{busy:.1f}.\n\n"
        f"{verdict(samples)}\n\n{ATTENTION}\n\n{table(samples).markdown()}"
    )


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="requests of each length and way")
    parser.add_argument("--more", action="store_true", help="add to the samples of the last run, of other engines")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = make_model(folder / "model", kv_heads=KV_HEADS, layers=LAYERS, head_dim=HEAD_DIM, heads=12, hidden=768)
    samples = load() if arguments.more else {way: {} for way in (*WAYS, STEP)}
    before = os.getloadavg()[0]
    with NodeServerProcess(folder / "home") as server, ExitStack() as stack:
        pairs = {}
        for name in (THEIRS, OURS):
            pair = Pair(name, model, folder, server.address, 1, chunk=CHUNK)
            stack.callback(pair.close)
            pairs[name] = pair
        for pair in pairs.values():
            pair.ready()
        in_turns = ((pairs[OURS], pairs[THEIRS]), (pairs[THEIRS], pairs[OURS]))
        ways = {PARTS: pairs[OURS], WHOLE: pairs[OURS], THEIRS: pairs[THEIRS]}
        # The first request of a pair connects its engines.
        for pair, idle in in_turns:
            with idle.stopped():
                pair.first_token(0, CHUNK)
        measure(samples, ways, server.address, arguments.repeats)
    text = report(samples, before)
    RESULTS.write_text(text)
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
