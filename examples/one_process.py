"""Prefill and decode in one process, over a node server inside it: the whole of kvferry on one screen."""

import numpy as np

import kvferry
from kvferry import Blocks, EngineSpec, Group

axes = ("kv", "block", "head", "token", "content")
group = Group("full", block_tokens=16, num_blocks=64)
source, destination = ({"layer0": np.full((2, 64, 8, 16, 128), value, np.uint16)} for value in (42, 0))
with kvferry.serve() as server, kvferry.Client(server.address) as client:
    prefill = client.register_cache(EngineSpec("prefill", (group,)), tensors=source, axes=axes)
    decode = client.register_cache(EngineSpec("decode", (group,)), tensors=destination, axes=axes)
    # Prefill's blocks 3 to 5 hold 40 tokens; decode reads them into its blocks 10 to 12.
    prompt = kvferry.Prompt(range(40))
    publication = prefill.session.publish("request-1", {"full": Blocks([3, 4, 5], end_token=40)}, prompt=prompt)
    result = decode.read(publication.reference, {"full": Blocks([10, 11, 12])}, prompt=prompt).result(timeout=5)
    print(f"moved {result.bytes} bytes in {result.descriptors} descriptors")
    (release,) = prefill.session.released(timeout=5)  # prefill may reuse its blocks
    print(f"{release.request_id} was released: {release.outcome.name}")
