"""The beginning of a prompt that one real vLLM engine has in its prefix cache, read by another because of the hint of
another project's router, in the form that this router gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.router_requests import ASKED, DYNAMO_TIER, HINTED, dynamo_hint, llm_d_hint
from tests.support.certificates import Authority, tls_flags
from tests.support.node_servers import Kvferryd
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone
from tests.support.vllm_versions import MINOR

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(MINOR < 32, reason="not run with this vLLM yet"),
]
BLOCK = 32
OF_ITS_OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine has a process of its own, as in a server: the source answers there, and hints come there serialised."""


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """A source, whose name is the address in the hints, and a reader, whose directory has it. Both have a certificate,
    without which nobody may ask an engine by its name."""
    model = make_model(tmp_path / "model", kv_heads=4)
    authority = Authority.make(tmp_path, "fleet")
    with ExitStack() as stack:
        flags = tls_flags(authority.issue("node"))
        home = stack.enter_context(Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags))
        directory = tmp_path / "directory.json"
        directory.write_text(json.dumps({"engines": {HINTED: {"home": home.address}}}))
        nodes = []
        for name, role in ((HINTED, "kv_both"), ("reader", "kv_consumer")):
            own = authority.issue(role)
            extra = {
                "address": home.address,
                "tls": {"ca": str(own.ca), "cert": str(own.cert), "key": str(own.key)},
                "directory": f"file:{directory}",
                "role": "both",
                # These two cores are not quick.
                "prefix_wait": 2.0,
            }
            ours = kvferry(role, home.address, kv_connector_extra_config=extra)
            # In MultiConnector, where a worker of Dynamo's has what makes Dynamo hint at it.
            several = {"connectors": [ours], "secondary_tiers": [DYNAMO_TIER]}
            connector = {
                **{"kv_connector": "MultiConnector", "kv_role": role, "engine_id": name},
                "kv_connector_extra_config": several,
            }
            log = tmp_path / f"{role}.log"
            nodes.append(Node(model, log, block=BLOCK, connector=connector, environment=OF_ITS_OWN))
            stack.callback(nodes[-1].close)
        yield nodes[0].ready(), nodes[1].ready()


def test_prefix_is_read_by_each_form_of_hint(engines: tuple[Node, Node]) -> None:
    source, reader = engines
    forms: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
        ({"kv_hint": dynamo_hint()}, None),
        ({"remote_kv_source": llm_d_hint()}, None),
        # The prefill of a pair, as llm-d's sidecar asks for it with `--enable-p2p-pull`.
        ({**ASKED, "remote_kv_source": llm_d_hint()}, None),
        # Of vLLM itself.
        (None, dynamo_hint()),
    ]
    # Computed by the reader: of another version, and of nobody that is known.
    ignored = [
        ({"kv_hint": {**dynamo_hint(), "protocol_version": "0.2"}}, None),
        ({"remote_kv_source": llm_d_hint("10.0.0.8")}, None),
        (None, dynamo_hint("10.0.0.8:7777")),
    ]
    prompts = [prompt(seed, 4 * BLOCK + 5) for seed in range(len(forms) + len(ignored))]
    expected = alone(source, prompts)

    def count(name: str) -> int:
        return int(reader.call("metric", f"vllm:{name}"))

    said = []
    for tokens, (params, hints) in zip(prompts, forms + ignored, strict=True):
        reader.call("begin", {**request(tokens, 12, params), "hints": hints}, 0)
        said.append(reader.call("end_begun")[0])
    assert said == expected
    counts = ["prefixes_asked", "prefixes_missed", "read", "failed", "hints_ignored"]
    assert [count(f"kvferry_{name}") for name in counts] == [4, 0, 4, 0, 3]
    # All blocks that the source has were read of four prompts, and nothing of the others.
    assert count("external_prefix_cache_hits") == 4 * 4 * BLOCK
