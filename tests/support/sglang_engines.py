"""Instances of a real SGLang on CPU, each the same as ``sglang serve``, with an HTTP server of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.node_servers import free_port
from tests.support.repository import ROOT
from tests.support.vllm_engines import VOCABULARY, installed

START_TIMEOUT = 600.0
ANSWER_TIMEOUT = 240.0
PAGE = 16

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_LOCAL_IP_NIC": "lo", "GLOO_SOCKET_IFNAME": "lo"}


class Instance:
    """An instance of SGLang.

    Args:
        model: folder of the model.
        log: where it writes its log.
        mode: "prefill", "decode", or "null": it does both itself.
        address: address of its node server.
        tp: its tensor-parallel size.
        tokenizer: whether it has one (`add_tokenizer`), which SGLang's ``/v1/completions`` needs.
        more: of its command line.
        environment: beside `ENVIRONMENT`.
        before: another instance, at whose ports it serves.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        mode: str = "null",
        address: str = "",
        *more: str,
        tp: int = 1,
        tokenizer: bool = False,
        environment: dict[str, str] | None = None,
        before: Instance | None = None,
    ) -> None:
        self.port, self.bootstrap_port = free_port(), free_port()
        if before is not None:
            self.port, self.bootstrap_port = before.port, before.bootstrap_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        arguments = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        arguments += ["--grammar-backend", "none", "--disable-cuda-graph"]
        arguments += [] if tokenizer else ["--skip-tokenizer-init"]
        arguments += ["--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "4096"]
        arguments += ["--mem-fraction-static", "0.9", "--max-running-requests", "16", "--tp-size", str(tp)]
        arguments += ["--sleep-on-idle", "--skip-server-warmup", "--num-reserved-decode-tokens", "64"]
        if mode != "null":
            arguments += ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "kvferry"]
            arguments += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        variables = {**installed(), **ENVIRONMENT, "KVFERRY_ADDRESS": address}
        if tp > 1:
            # SGLang gives each rank a NUMA node, or the cores that are named here.
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % 2) for rank in range(tp))
        variables |= environment or {}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *arguments, *more],
                cwd=ROOT,
                env=variables,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ready(self) -> Instance:
        """Wait until it serves."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"it does not serve: {self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                threading.Event().wait(0.2)

    def post(self, path: str, body: dict[str, Any], timeout: float = ANSWER_TIMEOUT) -> Any:
        """Post to it; returns what it says, also if that is an error."""
        asked = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return json.loads(error.read() or b"{}")

    def generate(self, prompt: list[int], max_tokens: int = 12, **more: Any) -> Any:
        """Post to ``/generate``."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return self.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})

    def abort(self, rid: str, waiting: Future[Any]) -> None:
        """Abort a request until it has been answered: what has not arrived yet is not aborted."""
        while not wait([waiting], 0.2).done:
            self.post("/abort_request", {"rid": rid})

    def counted(self, name: str, **labels: str) -> float:
        """A counter of all its ranks, which it shows with ``--enable-metrics``."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            shown = answer.read().decode()
        families = [each for each in text_string_to_metric_families(shown) if each.name == name]
        samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_total"]
        return sum(each.value for each in samples if labels.items() <= each.labels.items())

    def tail(self, size: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:]

    def close(self) -> None:
        """End it and its processes at once: SIGTERM makes SGLang look for what has crashed, for seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def make_windowed_model(folder: Path, *, kv_heads: int, window: int, layers: int = 4) -> Path:
    """A model of random weights, every second layer of which sees only so many tokens: Mellum. Of the models that
    have such layers in a pool of their own, SGLang computes few by `torch_native`."""
    import torch
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.MellumConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        mlp_layer_types=["dense"] * layers,
        sliding_window=window,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model: Any = transformers.MellumForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def add_tokenizer(model: Path) -> None:
    """Give a model a tokenizer, of a word for each token."""
    import tokenizers
    import transformers

    words = {f"w{token}": token for token in range(VOCABULARY)}
    made: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1").save_pretrained(model)


def some_room() -> int:
    """A room, as SGLang's routers draw them."""
    return random.getrandbits(63)


def named(prefill: Instance, room: int) -> dict[str, Any]:
    """What a router adds to a request."""
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}


def served(prefill: Instance, decode: Instance, room: int, prompt: list[int], max_tokens: int = 12, **more: Any) -> Any:
    """Ask both for a request at once, as SGLang's routers do; returns decode's answer."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prefill.generate, prompt, max_tokens, **named(prefill, room), **more)
        answer = pool.submit(decode.generate, prompt, max_tokens, **named(prefill, room), **more).result()
        first.result()
        return answer
