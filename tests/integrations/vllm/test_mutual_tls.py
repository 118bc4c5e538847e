"""Engines of a real vLLM whose node servers take nobody without a certificate."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority, tls_flags
from tests.support.node_servers import Kvferryd, serves
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, offered, ready, said


@pytest.mark.timeout(600)
def test_engines_of_two_nodes_read_with_mutual_tls(tmp_path: Path) -> None:
    """Each engine has a node server and a certificate of its own."""
    model = make_model(tmp_path / "model", kv_heads=4)
    authority = Authority.make(tmp_path, "fleet")
    with ExitStack() as stack:
        engines = []
        for role in ("kv_producer", "kv_consumer"):
            flags = tls_flags(authority.issue(f"node-{role}"))
            home = stack.enter_context(Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags))
            with pytest.raises(grpc.RpcError):
                serves(home.address)
            own = authority.issue(role)
            tls = {"ca": str(own.ca), "cert": str(own.cert), "key": str(own.key)}
            extra = {"address": home.address, "tls": tls}
            connector = kvferry(role, home.address, kv_connector_extra_config=extra, kv_load_failure_policy="fail")
            engines.append(Node(model, tmp_path / f"{role}.log", connector=connector))
            stack.callback(engines[-1].close)
        prefill, decode = (ready(engine) for engine in engines)
        prompts = [prompt(length, length) for length in (33, 100)]
        expected = alone(prefill, prompts)
        params = offered(prefill, prompts)
        answers = decode.generate(*(request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)))
        assert said(answers) == expected
        assert decode.call("metric", "vllm:kvferry_read") == len(prompts)
