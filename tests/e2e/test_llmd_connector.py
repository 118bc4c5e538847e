"""The connector for llm-d's coordinator: engines hand requests over by the `kv_transfer_params` that it makes.

They are read, and answered, by what vLLM's connector does with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import Blocks, ReleaseOutcome, router_reference
from kvferry._wire.reference import parse_reference
from kvferry.integrations.vllm.requests import (
    asks_to_publish,
    publish_reference,
    published_params,
    read_reference,
    traceparent_of,
)
from tests.support.engines import Engine
from tests.support.guides import commands
from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed"),
]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Params = Callable[..., Any]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of Go, which needs nothing from elsewhere."""
    cache = str(tmp_path_factory.mktemp("go"))
    offline = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
    return {**os.environ, **offline, "GOCACHE": cache}


@pytest.fixture(scope="module")
def params(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Params:
    """What the connector makes for a request: see `examples/llm-d/params/main.go`."""
    program = tmp_path_factory.mktemp("params") / "params"
    build = ["go", "build", "-o", str(program), "./params"]
    made = subprocess.run(build, cwd=ROOT / "examples" / "llm-d", env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr

    def make(what: str, *arguments: Any, traceparent: str = "") -> Any:
        command = [str(program), what, *(one if isinstance(one, str) else json.dumps(one) for one in arguments)]
        client = {"TRACEPARENT": traceparent}
        done = subprocess.run(command, env=client, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    return make


def request(kv_transfer_params: dict[str, Any]) -> SimpleNamespace:
    """As vLLM's connector sees it."""
    return SimpleNamespace(kv_transfer_params=kv_transfer_params)


def test_commands_of_the_readme_test_the_connector_and_print_params(environment: dict[str, str]) -> None:
    script = "\n".join(["set -e", *commands("examples/README.md", "llm-d")])
    asked = {**environment, "NODE": "10.0.0.1:7423"}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=asked, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr + done.stdout
    tested, *printed = [line for line in done.stdout.splitlines() if "no test files" not in line]
    assert tested.startswith("ok")
    prefill, decode, ahead = map(json.loads, printed)
    assert prefill == {"do_remote_decode": True, "do_remote_prefill": False}
    assert decode == {"do_remote_decode": False, "do_remote_prefill": True, "kvferry_reference": "kvf1.x"}
    assert parse_reference(ahead["kvferry_reference"]).home == "10.0.0.1:7423"


def test_prefill_answers_with_a_reference_that_decode_reads(one_to_one: tuple[Engine, Engine], params: Params) -> None:
    source, destination = one_to_one
    asked = request(params("prefill", None, traceparent=TRACEPARENT))
    assert asks_to_publish(asked)
    assert (publish_reference(asked), traceparent_of(asked)) == ("", TRACEPARENT)
    publication = source.session.publish("in-turn", {"full": Blocks([1])})
    reads = request(params("decode", published_params(publication), traceparent=TRACEPARENT))
    assert not asks_to_publish(reads)
    result = destination.ranks[0].read(read_reference(reads), [2], None)
    assert (result.request_id, result.bytes > 0) == ("in-turn", True)
    assert source.release_of(publication).outcome is ReleaseOutcome.READ


def test_reference_made_ahead_is_read_before_it_is_published(
    homes: tuple[str, str], one_to_one: tuple[Engine, Engine], params: Params
) -> None:
    source, destination = one_to_one
    known = params("ahead", homes[0], source.spec.engine_id, "0")
    destination.ranks[0].send_read(read_reference(request(params("decode", known))), [2], None)
    asked = request(params("prefill", known))
    assert asks_to_publish(asked)
    publication = source.session.publish("at-once", {"full": Blocks([1])}, reference=publish_reference(asked))
    assert destination.ranks[0].answer().request_id == "at-once"
    assert source.release_of(publication).outcome is ReleaseOutcome.READ


def test_decode_computes_what_prefill_has_not_published(params: Params) -> None:
    """Prefill's answer has no `kv_transfer_params` then."""
    assert params("decode", None) == {"do_remote_decode": False, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("home", "engine_id", "rank"),
    [("10.0.0.1:7423", "prefill-0", 0), ("", "é" * 128, 1), ("unix:/" + "x" * 250, "prefill 0", 2**32 - 1)],
    ids=["home", "directory", "longest"],
)
def test_references_are_those_of_python(params: Params, home: str, engine_id: str, rank: int) -> None:
    text, other = (params("ahead", home, engine_id, str(rank))["kvferry_reference"] for _ in range(2))
    made = parse_reference(text)
    again = router_reference(home, engine_id, router_key=made.router_key, key=made.key, data_parallel_rank=rank)
    assert text == again
    # Listings show router_keys: they tell nothing of the key.
    assert made.key.hex() not in made.router_key
    assert {made.key, made.router_key}.isdisjoint({parse_reference(other).key, parse_reference(other).router_key})


@pytest.mark.parametrize(
    "arguments",
    [("ahead", "", "", "0"), ("ahead", "h", "e", "4294967296"), ("decode", "[]"), ("decode",), ("publish", "null"), ()],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(params: Params, arguments: tuple[str, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        params(*arguments) if arguments else params("")
    assert caught.value.returncode == 2
    assert caught.value.stderr
    assert not caught.value.stdout
