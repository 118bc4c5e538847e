"""What requests that wait for prefill cost decode in each step: CPU time of a step of a real vLLM in which one request
is decoded, by the number of others that wait for publications that do not come.

In vLLM's environment: `make bench-vllm`. Where the time goes is measured, too: in vLLM's loop over the waiting
requests, in its look into the prefix cache for each, and in the connector.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from benchmarks.tables import Table
from kvferry import Client, EngineSpec, Group, router_reference
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import ENVIRONMENT, kvferry, make_model, prompt

WAITING = (0, 100, 256, 500, 2000)
PROMPT = 1000
STEPS = 60

RESULTS = Path(__file__).parent / "RESULTS-vllm-waiting.md"

Spent = defaultdict[str, float]
"""CPU seconds of the engine's thread, by part."""


def timed(spent: Spent, owner: Any, name: str, part: str) -> None:
    """Add up the CPU time of a method of an object."""
    inner: Callable[..., Any] = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return inner(*given, **named)
        finally:
            spent[part] += time.thread_time() - began

    setattr(owner, name, call)


def row(engine: Any, spent: Spent, waiting: int, first: float) -> tuple[tuple[str, ...], float]:
    """Make steps; return the line of the table, and the CPU seconds of a median step. `first`: that of none waiting."""
    took = []
    spent.clear()
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        took.append(time.thread_time() - began)
    step = statistics.median(took)
    parts = [f"{1000 * spent[part] / STEPS:.2f}" for part in ("schedule", "prefix", "connector")]
    return (str(waiting), f"{1000 * step:.2f}", f"{step / (first or step):.2f}", *parts), step


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, help="how many requests wait, rising")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    folder = Path(tempfile.mkdtemp())
    model = make_model(folder / "model", kv_heads=2)
    with NodeServerProcess(folder / "home", tcp=True) as home, Client(home.address) as client:
        # It never publishes.
        group = Group("full", block_tokens=32, num_blocks=8)
        client.register_cache(EngineSpec("prefill", (group,)), tensors={"layer": numpy.zeros((8, 1024), numpy.uint8)})
        connector = kvferry("kv_consumer", home.address, kv_buffer_device="cpu")
        connector["kv_connector_extra_config"]["read_timeout"] = 3600.0
        engine: Any = LLM(
            str(model),
            dtype="float32",
            block_size=32,
            max_model_len=2048,
            kv_cache_memory_bytes=16 << 20,
            max_num_seqs=16,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(**connector),
        ).llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        spent: Spent = Spent(float)
        timed(spent, scheduler, "schedule", "schedule")
        timed(spent, scheduler.kv_cache_manager, "get_computed_blocks", "prefix")
        for name in ("get_num_new_matched_tokens", "build_connector_meta", "update_connector_output"):
            timed(spent, scheduler.connector, name, "connector")

        def add(name: str, tokens: list[int], most: int, params: dict[str, Any] | None) -> None:
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(
                temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, extra_args=extra
            )
            engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

        add("decoding", prompt(0, 64), 1900, None)
        rows, first, waiting = [], 0.0, 0
        for count in arguments.waiting:
            for number in range(waiting, count):
                theirs = {
                    "do_remote_prefill": True,
                    "kvferry_reference": router_reference(home.address, "prefill"),
                }
                add(f"waits-{number}", prompt(number + 1, PROMPT), 12, theirs)
            waiting = count
            for _ in range(STEPS // 3):
                engine.step()
            line, step = row(engine, spent, count, first)
            first = first or step
            rows.append(line)
            print(line, flush=True)
        columns = ("waiting", "a step, ms", "in none's", "schedule()", "of it: prefix cache", "the connector")
        table = Table(f"CPU time of vLLM's thread, median of {STEPS} steps, parts their means", columns, rows)
        text = (
            "# vLLM, requests that wait for prefill\n\n"
            f"Written by `make bench-vllm`: prompts of {PROMPT} tokens wait in decode, which decodes another "
            f"request, on CPU.\n\n{table.markdown()}"
        )
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
