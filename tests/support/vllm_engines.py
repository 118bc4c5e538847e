"""Engines of a real vLLM on CPU, each in a process of its own, and a tiny model for them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

START_TIMEOUT = 600.0
ANSWER_TIMEOUT = 120.0
VOCABULARY = 512
CONNECTOR = "KvferryConnector"
"""The connector's name for vLLM, which knows it by the entry point."""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def make_model(
    folder: Path,
    *,
    kv_heads: int,
    layers: int = 4,
    head_dim: int = 32,
    heads: int = 4,
    hidden: int = 128,
    window: int = 0,
    vocabulary: int = VOCABULARY,
) -> Path:
    """A model of random weights, large ones, so that a wrong byte of its cache changes what it says: Qwen3, or, with a
    window, Gemma 3, every second layer of which sees only so many tokens. More kinds: `tests.support.vllm_models`."""
    import torch
    import transformers

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    if window:
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        config = transformers.Gemma3TextConfig(**common, sliding_window=window, layer_types=kinds)
        model: Any = transformers.Gemma3ForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


@functools.cache
def installed() -> dict[str, str]:
    """The environment of a vLLM beside which this checkout is installed: with the entry points that pip would make of
    its pyproject.toml, which those of an older installation here may lack, and with `tests.support.vllm_waits`."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = [
        distribution("kvferry", project["version"], project["entry-points"]),
        distribution("kvferry-waits", "1", {"vllm.general_plugins": {"waits": "tests.support.vllm_waits:register"}}),
        *(str(folder) for folder in (ROOT / "client", ROOT / "server", ROOT)),
    ]
    paths = [*folders, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@functools.cache
def plugged(group: str, module: str) -> dict[str, str]:
    """What an engine's environment has beside `installed`, so that it loads the `register` of a module as a plug-in."""
    name = module.rpartition(".")[2]
    folder = distribution(name, "1", {group: {name: f"{module}:register"}})
    return {"PYTHONPATH": os.pathsep.join([folder, installed()["PYTHONPATH"]])}


def distribution(name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> str:
    """A folder that describes a distribution as pip would: its entry points by group and name."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-installed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    described = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in named.items())
        for group, named in points.items()
    ]
    (described / "entry_points.txt").write_text("\n".join(groups))
    return str(folder)


class Node:
    """An engine.

    Args:
        model: folder of the model.
        log: where it writes its log.
        tp: its tensor-parallel size.
        block: tokens per block; None: as vLLM chooses.
        connector: `kv_connector` and what else the transfer configuration says; None: no connector.
        environment: beside `ENVIRONMENT`.
        python: the interpreter of the environment that has its vLLM.
        settings: arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tp: int = 1,
        block: int | None = 32,
        connector: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        **settings: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "tensor_parallel_size": tp,
            "block_size": block,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 16 << 20,
            "max_num_seqs": 16,
            **settings,
        }
        if connector:
            arguments["kv_transfer"] = {"kv_buffer_device": "cpu", **connector}
        self.log = log
        self.is_ready = False
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [python, "-m", "tests.support.vllm_engine_program", json.dumps(arguments)],
                cwd=ROOT,
                env={**installed(), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )

    def ready(self) -> Node:
        """Wait until it serves."""
        assert self.answer(START_TIMEOUT) == "ready"
        self.is_ready = True
        return self

    def send(self, command: str, *arguments: Any) -> None:
        """Begin to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def call(self, command: str, *arguments: Any) -> Any:
        """Do something, and wait for it."""
        self.send(command, *arguments)
        answer = self.answer()
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def answer(self, timeout: float = ANSWER_TIMEOUT) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {timeout} s: {self.tail()}")
            chunk = os.read(self.process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise EOFError(f"the engine has ended: {self.tail()}")
            line += chunk
        return json.loads(line)

    def generate(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Generate, and wait for it."""
        answer: list[dict[str, Any]] = self.call("generate", *requests)
        return answer

    def tail(self, size: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:]

    def close(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and its workers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Server:
    """The same as ``vllm serve``: an HTTP server on a port of its own.

    Args:
        model, log, connector, environment, python: as `Node`'s.
        more: of its command line.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        port: int,
        connector: dict[str, Any],
        *more: str,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", "32"]
        arguments += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(16 << 20), "--enforce-eager"]
        arguments += [
            "--skip-tokenizer-init",
            "--kv-transfer-config",
            json.dumps({"kv_buffer_device": "cpu", **connector}),
            *more,
        ]
        variables = {name: value for name, value in installed().items() if "MULTIPROCESSING" not in name}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [str(Path(python).parent / "vllm"), "serve", str(model), *arguments],
                cwd=ROOT,
                env={**variables, **(environment or {})},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ready(self) -> Server:
        """Wait until it serves."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"it does not serve: {self.log.read_text(errors='replace')[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                threading.Event().wait(0.2)

    def complete(self, body: dict[str, Any], rank: int = 0, timeout: float = ANSWER_TIMEOUT) -> Any:
        """Post to ``/v1/completions``, for a data-parallel rank. Raises `OSError` if it refuses, or does not answer."""
        headers = {"content-type": "application/json", "x-data-parallel-rank": str(rank)}
        asked = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return json.load(answer)

    def metrics(self) -> str:
        """What it says at ``/metrics``."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """A counter or gauge, or those whose names begin so, over all labels."""
        return sum(float(line.rpartition(" ")[2]) for line in self.metrics().splitlines() if line.startswith(name))

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to it and its engine."""
        os.killpg(self.process.pid, number)

    def close(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and its engine."""
        if self.process.poll() is None:
            self.kill(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def kvferry(role: str, address: str, **transfer: Any) -> dict[str, Any]:
    """Our connector in a transfer configuration."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": role,
        "kv_connector_extra_config": {"address": address},
        **transfer,
    }


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def request(
    prompt: list[int], max_tokens: int = 12, params: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """What a node is asked; `sampling`: `n`, `temperature`, `seed`, `logprobs`."""
    return {"prompt": prompt, "max_tokens": max_tokens, "params": params, **sampling}


def prompt(seed: int, length: int = 100) -> list[int]:
    """A prompt of random tokens."""
    import random

    generator = random.Random(seed)
    return [generator.randrange(3, VOCABULARY) for _ in range(length)]
