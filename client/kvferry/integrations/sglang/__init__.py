"""SGLang's disaggregation backend for kvferry: moves the KV cache from prefill to decode instances of any
tensor-parallel sizes.

    KVFERRY_ADDRESS=unix:/run/kvferry/node.sock sglang serve --model-path MODEL \
        --disaggregation-mode prefill --disaggregation-transfer-backend kvferry

SGLang finds the backend by the entry point ``kvferry`` of the group ``sglang.srt.plugins``. Every rank of SGLang runs a
scheduler of its own. Rank 0 opens the engine's session, publishes for all ranks, and receives releases. In decode every
rank reads for itself, under a read_id that all ranks share, and SGLang's own reduction over the ranks combines their
answers. `docs/sglang.md` is the guide.
"""
