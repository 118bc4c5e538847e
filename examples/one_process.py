"""Prefill and decode in one process, over a node server inside it: the whole of kvferry on one screen."""

import numpy as np

import kvferry
from kvferry import Blocks, EngineSpec, Group


def main() -> None:
    """Move the KV cache of one request from one engine to another."""
    group = Group("full", block_tokens=16, num_blocks=64)
    caches = [{f"layer{i}": np.zeros((2, 64, 8, 16, 128), np.uint16) for i in range(4)} for _ in range(2)]
    axes = ("kv", "block", "head", "token", "content")
    with kvferry.serve() as server, kvferry.Client(server.address) as client:
        prefill, decode = (
            client.register_cache(EngineSpec(name, (group,)), tensors=cache, axes=axes)
            for name, cache in zip(("prefill", "decode"), caches, strict=True)
        )
        # The prefill engine computes a request of 40 tokens into its blocks 3, 4 and 5, and publishes them ...
        for tensor in caches[0].values():
            tensor[:, [3, 4, 5]] = 42
        publication = prefill.session.publish("request-1", {"full": Blocks([3, 4, 5], end_token=40)})
        # ... the router passes `publication.reference` on, and the decode engine reads it into its blocks 10, 11 and
        # 12.
        read = decode.read(publication.reference, {"full": Blocks([10, 11, 12])}, tokens=(0, 40))
        result = read.result(timeout=5)
        print(f"moved {result.bytes} bytes in {result.descriptors} descriptors")
        # The home has told the prefill engine that its blocks are free again, exactly once.
        (release,) = prefill.session.released(timeout=5)
        print(f"{release.request_id} was released: {release.outcome.name}")


if __name__ == "__main__":
    main()
