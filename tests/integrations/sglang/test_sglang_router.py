"""SGLang's own router between a prefill and a decode instance."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.sglang_engines import ANSWER_TIMEOUT, START_TIMEOUT, Instance, served, some_room
from tests.support.vllm_engines import prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("sglang_router") is None, reason="SGLang's router is not installed here"),
]


def post(url: str, body: dict[str, object]) -> dict[str, list[int]]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=ANSWER_TIMEOUT) as answer:
        found: dict[str, list[int]] = json.load(answer)
        return found


@pytest.mark.parametrize("kind", ["router", "mini_lb"])
def test_router_serves_concurrent_requests(kind: str, instances: tuple[Instance, Instance], tmp_path: Path) -> None:
    prefill, decode = instances
    port = free_port()
    arguments = ["--pd-disaggregation", "--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--mini-lb"] if kind == "mini_lb" else ["--prometheus-port", str(free_port())]
    with (tmp_path / "router.log").open("wb") as log:
        router = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *arguments],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        # The router knows its instances only some time after it is alive.
        ready = "readiness" if kind == "router" else "health"
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert router.poll() is None, (tmp_path / "router.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"{url}/{ready}", timeout=5):
                    break
            except OSError:
                threading.Event().wait(0.2)
        prompts = [prompt(seed, 20 + 7 * seed) for seed in range(8)]
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        bodies = [{"input_ids": tokens, "sampling_params": sampling} for tokens in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: post(f"{url}/generate", body), bodies))
        direct = [served(prefill, decode, some_room(), tokens) for tokens in prompts]
        assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in direct]
    finally:
        os.killpg(router.pid, signal.SIGKILL)
        router.wait()


@pytest.fixture(scope="module")
def instances(model: Path, home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("instances")
    both = [Instance(model, folder / f"{mode}.log", mode, home.address) for mode in ("prefill", "decode")]
    try:
        yield tuple(instance.ready() for instance in both)
        until(lambda: pinned(home) == 0)
    finally:
        for instance in both:
            instance.close()
