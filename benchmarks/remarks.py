"""Why a goal is missed: what the limit is, as far as it is known. Written by hand, by the key of the goal in
`benchmarks.goals`; shown only while it is missed. What no measurement of this suite shows is called a guess."""

from __future__ import annotations

_TABLE = "[Where the time goes](#where-the-time-goes) has"
_CHECKS = (
    "the server checks the request and the caller, keeps a record and sets a timer in case nobody takes the "
    "answer, where a bare server looks at nothing. The handler alone takes 80 µs for a publication of 256 blocks, of "
    "which decoding and checking the runs of blocks is the largest part. A renewal, which does least, takes 1.3 times "
    "a bare call: that is the guard around every call, which reads each request itself."
)
_COPY = (
    "raw NIXL's best program is the limit: UCX copies by process_vm_readv, which alone was measured at 0.50 to 0.56 of "
    "memcpy on one of these machines, where this goal was missed by more, and reaches memcpy's speed on others. "
    f"{_TABLE} both, and what a read adds: its calls, and its movement outside of NIXL."
)
_TWO = (
    "two agents share the read, beside the node server, the source and the engine's loop on the same two cores: with "
    "idle cores for both, two threads of process_vm_readv were measured at 1.5 to 2 times one."
)
_ESTIMATE = (
    "only where the two paths take about as long. There the same read takes longer or shorter from one time to the "
    "next by more than the paths differ, and so does what the constants are measured by "
    "([What was tried](#what-was-tried) has the worst choices of several runs)."
)

REMARKS = {
    "read": f"{_TABLE} its stages, measured through the ports. Its two calls take about three times as "
    "long as bare ones, because "
    "they begin and end on threads that have to be woken, with cold caches: after a pause a bare call takes half as "
    "long again to twice as long too, so that two of them are most of the goal. The movement is the smaller part.",
    "read-after": "as above, without the report.",
    "ports": f"{_TABLE} its stages. Each call takes twice to four times as long as a bare one, and the "
    "engine's loop, which looks every "
    "0.2 ms, adds to each stage: on average a tenth of a millisecond, and its own sleep.",
    "concurrent": "the node server's CPU per read alone takes several times as long as raw NIXL takes for a "
    "whole read, so "
    "one server process cannot reach the goal at this cost. The reader's own Python shares the two cores with it.",
    "long": _COPY,
    "long-two": f"{_COPY[:-1]}; {_TWO}",
    "scattered": f"{_TABLE} the parts: within NIXL a read takes about what the raw program takes. What it adds to the "
    "movement is about 2 ms for every read of this size, after 128 MiB have gone through the caches, and so a smaller "
    "share of a larger one.",
    "scattered-two": _TWO,
    "tcp": f"{_TABLE} the parts. The whole read is compared here, with its calls, which are a tenth of it. A third of "
    "the movement is outside of NIXL: pauses while the source sends, in which other threads run, and Python between "
    "checks. To leave either out did not help: the engine's loop shares two cores with the sending and the reading "
    "thread, and slows raw NIXL beside it too ([What was tried](#what-was-tried)).",
    "tcp-best": "as with the same options. Raw NIXL has twelve tries, of which the fastest counts: chance favours it.",
    "choice": _ESTIMATE,
    "choice-tcp": _ESTIMATE,
    "handshake": "the server decodes the reader's planes, compares them with the source's field by field, and "
    "encodes those "
    "of the source, in Python. A bare stream with messages of the same sizes takes about an echo.",
    "handshakes": "not taken apart here.",
    "blocks": _CHECKS,
    "publish": _CHECKS,
    "report": "the server ends the lease and tells the source of the release on its Watch, which is one more message.",
    "cpu": "two bare calls of grpc.aio, one at a time, already take more than the goal on this machine.",
    "trips": "not taken apart here.",
    "step": "not taken apart here.",
    "renew": "all other leases are renewed at the same time, in batches, and each batch keeps the event loop.",
    "lease": "not taken apart here.",
    "idle": "not taken apart here.",
    "first": "not taken apart here.",
    "vllm": "at TP 1 to 1, NixlConnector's fastest requests were about 5 ms faster than kvferry's, whatever their "
    "length: what a request takes through the ports (the table below), whose home is asked for a lease before the "
    "bytes move and for its verdict after, where NixlConnector reads at once. Its other requests scatter more.",
    "vllm concurrent": "the table of its page has vLLM's own step, which computes the first token: its attention reads "
    "the whole prompt, however its blocks have come there.",
}
