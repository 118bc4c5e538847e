"""Two engines of this host, which use the node server at an address: one reads what the other has.

python two_engines.py unix:/run/kvferry/node.sock
"""

import sys

import numpy as np

import kvferry
from kvferry import Blocks, EngineSpec, Group, Prompt

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=16, num_blocks=64)
PROMPT = Prompt(range(40))


def main(address: str) -> None:
    """Print what became of the read."""
    source, destination = (np.full((2, 64, 8, 16, 128), value, np.uint16) for value in (42, 0))
    with kvferry.Client(address) as client:
        prefill = client.register_cache(EngineSpec("prefill", (GROUP,)), tensors={"layer0": source}, axes=AXES)
        decode = client.register_cache(EngineSpec("decode", (GROUP,)), tensors={"layer0": destination}, axes=AXES)
        publication = prefill.session.publish("request-1", {"full": Blocks([3, 4, 5], end_token=40)}, prompt=PROMPT)
        decode.read(publication.reference, {"full": Blocks([10, 11, 12])}, prompt=PROMPT).result(timeout=30)
        (release,) = prefill.session.released(timeout=30)
    right = (destination[:, 10:12] == 42).all() and (destination[:, 12, :, :8] == 42).all()
    print(release.outcome.name, "all right" if right else "WRONG")


if __name__ == "__main__":
    main(sys.argv[1])
