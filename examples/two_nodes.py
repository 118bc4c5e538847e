"""Prefill on one node and decode on another, over mutual TLS: `docs/deployment.md` runs it.

python two_nodes.py prefill --server unix:/run/kvferry/node.sock --certs certs/prefill --reference reference
python two_nodes.py decode --server unix:/run/kvferry/node.sock --certs certs/decode --reference reference
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvferry import Blocks, Cache, Client, EngineSpec, Group, Prompt, TlsConfig

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=16, num_blocks=64)
TOKENS = 40
PROMPT = Prompt(range(TOKENS))


def prefill(cache: Cache, tensor: np.ndarray, reference: Path) -> None:
    """Publish a request, as a router would pass it on, and wait until it has been read, or held for as long as
    kvferryd's --hold says."""
    tensor[:, 3:6] = 42
    publication = cache.session.publish("request-1", {"full": Blocks([3, 4, 5], end_token=TOKENS)}, prompt=PROMPT)
    # Renamed, so that whoever waits for the file finds it whole. It is a capability: only its reader may see it.
    written = reference.with_suffix(".new")
    written.touch(0o600)
    written.write_text(publication.reference)
    written.rename(reference)
    (release,) = cache.session.released(timeout=600)
    print(f"{release.request_id} was released: {release.outcome.name}")


def decode(cache: Cache, tensor: np.ndarray, reference: Path) -> None:
    """Read the request, and look at every byte."""
    result = cache.read(reference.read_text(), {"full": Blocks([10, 11, 12])}, prompt=PROMPT).result(timeout=60)
    right = bool((tensor[:, 10:12] == 42).all() and (tensor[:, 12, :, : TOKENS - 32] == 42).all())
    print(f"moved {result.bytes} bytes, {'all right' if right else 'WRONG'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine of a pair.")
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--server", required=True, help="this node's server")
    parser.add_argument("--certs", required=True, type=Path, help="certificate and key, without .pem and .key")
    parser.add_argument("--reference", required=True, type=Path, help="file that stands for the router")
    given = parser.parse_args()
    # For other nodes: the own one is asked over its UNIX socket.
    tls = TlsConfig(
        ca=given.certs.with_name("ca.pem"), cert=given.certs.with_suffix(".pem"), key=given.certs.with_suffix(".key")
    )
    tensor = np.zeros((2, 64, 8, 16, 128), np.uint16)
    with Client(given.server, tls=tls) as client:
        cache = client.register_cache(EngineSpec(f"{given.role}-0", (GROUP,)), tensors={"layer0": tensor}, axes=AXES)
        (prefill if given.role == "prefill" else decode)(cache, tensor, given.reference)


if __name__ == "__main__":
    main()
