"""kvferry from outside Python: reflection for tools without proto files, and a client made from the proto files
alone."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from collections.abc import Callable

import pytest
from google.protobuf.json_format import MessageToDict

from kvferry import Blocks, Interval, PromptInput, RankGeometry
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto
from tests.support.caches import Model, shards
from tests.support.engines import Engine
from tests.support.prompt_marks import Case, vectors
from tests.support.repository import ROOT

NODE = ROOT / "tests" / "support" / "nodejs"
BUF = NODE / "node_modules" / ".bin" / "buf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BUF.exists(), reason="tests/support/nodejs is not installed: npm was missing at set-up"),
]

MakeEngine = Callable[..., Engine]


def buf_curl(url: str, *arguments: str) -> str:
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=NODE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reflection_lists_the_services(homes: tuple[str, str]) -> None:
    """As v1alpha, which tools try when v1 is not offered."""
    listed = buf_curl(f"http://{homes[0]}", "--list-services").split()
    assert {"kvferry.v1.KVTransfer", "kvferry.v1.Introspection", "grpc.health.v1.Health"} <= set(listed)


def test_rpc_can_be_called_through_reflection(engine: MakeEngine, homes: tuple[str, str]) -> None:
    source = engine(homes[0], Model(), shards(4, 2)).ready()
    url = f"http://{homes[0]}/kvferry.v1.Introspection/GetEngine"
    request = json.dumps({"engineId": source.spec.engine_id})
    answer = json.loads(buf_curl(url, "--data", request))
    assert answer["summary"]["state"] == "ENGINE_STATE_READY"
    assert answer["summary"]["numRanks"] == 2


def test_client_in_another_language_handshakes_and_reads_blocks(engine: MakeEngine, homes: tuple[str, str]) -> None:
    model = Model()
    source = engine(homes[0], model, shards(4, 2)).ready()
    reference = source.session.publish("foreign", {"full": Blocks([4, 5, 6, 9], end_token=60)}).reference
    rank = RankGeometry(0, tuple(model.planes(Interval(0, 4), base=1 << 40)))
    handshake = {
        "identity": dict(source.spec.identity),
        "groups": [MessageToDict(group_to_proto(model.group()), preserving_proto_field_name=True)],
        "rank": MessageToDict(rank_to_proto(rank), preserving_proto_field_name=True),
    }
    command = ["node", "foreign_client.mjs", str(ROOT / "protos"), reference, json.dumps(handshake)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=NODE)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["home"] == homes[0]
    assert (answer["ranks"], answer["planes"]) == (2, 4)
    assert all(size > 100 for size in answer["agents"])
    assert answer["steps"] == 1
    (blocks,) = answer["blocks"]
    assert (blocks["run_starts"], blocks["run_counts"]) == (["4", "9"], [3, 1])
    assert blocks["end_token"] == "60"
    assert answer["verdict"] == "VERDICT_VALID"
    assert source.session.released(timeout=10)[0].outcome.name == "READ"


def test_marks_of_prompts_are_the_same_in_javascript() -> None:
    """The contract's definition alone is enough to make them."""
    key, known = vectors()
    cases, digests = [case for case, _ in known], [digest for _, digest in known]
    for seed in range(40):
        draw = random.Random(seed)
        tokens = [draw.randrange(2 ** draw.choice((4, 17, 32))) for _ in range(draw.randrange(1, 200))]
        # Two inputs may begin at one token; the last two names sort differently by UTF-8 and by UTF-16.
        names = draw.choices(["image", "video", "\uffff", "\U00010000"], k=draw.randrange(5))
        inputs = [PromptInput(draw.choice((0, 3, 60)), draw.choice((1, 50, 2**53 - 1)), name) for name in names]
        case = Case(tokens, draw.randint(1, len(tokens)), draw.choice(("", "sql-é", "補助")), tuple(inputs))
        cases.append(case)
        digests.append(case.prompt().mark(key, case.end))
    asked = json.dumps([{"key": key.hex(), **dataclasses.asdict(case)} for case in cases])
    command = ["node", "prompt_marks.mjs"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, cwd=NODE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [digest.hex() for digest in digests]
