"""Why a goal is missed: what the limit is, as far as it is known. Written by hand, by the key of the goal in
`benchmarks.goals`; shown only while it is missed. What no measurement of this suite shows is called a guess."""

from __future__ import annotations

_TABLE = "[stages](#stages-of-a-request)"
_CHECKS = (
    "the server checks the request and the caller, keeps a record and sets a timer, where a bare server looks at "
    "nothing. The handler takes 80 µs for a publication of 256 blocks, mostly to decode and check the runs of blocks. "
    "A renewal, which does least, takes 1.3 times a bare call: that is the guard around every call."
)
_TWO = (
    "two agents share two cores with the node server, the source and the engine's loop; with idle cores, two threads "
    "of process_vm_readv were measured at 1.5 to 2 times one."
)
_ESTIMATE = (
    "only where the two paths take about as long, and times differ more from one read to the next than the paths do "
    "([What was tried](#what-was-tried) has the worst choices of several runs)."
)

REMARKS = {
    "read": f"its call takes about twice as long as a bare one, because it begins and ends on threads that have to be "
    f"woken, with cold caches; after a pause a bare call takes 1.5 to 2 times as long, too ({_TABLE}, "
    "through the ports). Planning and handing over to the reading thread and back are the rest.",
    "leased": "its two calls take about three times as long as bare ones, as above.",
    "ports": "each call takes twice to three times as long as a bare one, and the engine's loop, which looks every "
    "0.2 ms, adds to each stage.",
    "concurrent": "the node server's CPU per read alone takes several times as long as raw NIXL takes for a whole "
    "read. The reader's own Python shares the two cores with it.",
    "long": "raw NIXL's best program is the limit: UCX copies by process_vm_readv, which alone was measured at 0.50 to "
    f"0.56 of memcpy on one of these machines, and reaches memcpy's speed on others ({_TABLE}: both).",
    "long-two": f"as for one agent; {_TWO}",
    "scattered": "within NIXL a read takes about what the raw program takes. The rest of the movement is about 2 ms "
    "for every read of this size, and so a smaller share of a larger one.",
    "scattered-two": _TWO,
    "tcp": "the whole read is compared, and its calls are a tenth of it. A third of the movement is outside of NIXL: "
    "pauses while the source sends, and Python between checks. To leave either out did not help "
    "([What was tried](#what-was-tried)).",
    "tcp-best": "as with the same options. Raw NIXL has twelve tries, of which the fastest counts: chance favours it.",
    "mooncake": "at 16 MiB what a read adds, whatever its size, is a third of it; from 64 MiB on kvferry is faster.",
    "mooncake-short": "Mooncake has no verdict: this is what one round trip to the home costs, and the hand-overs to "
    "the reading thread and back.",
    "choice": _ESTIMATE,
    "choice-tcp": _ESTIMATE,
    "handshake": "the server decodes the reader's planes, compares them with the source's field by field, and encodes "
    "those of the source, in Python.",
    "handshakes": "not taken apart here.",
    "blocks": _CHECKS,
    "publish": "as for asking for blocks.",
    "validate": _CHECKS,
    "report": "the server ends the lease and tells the source of the release on its Watch, which is one more message.",
    "cpu": "a bare call of grpc.aio takes more than half of the goal; the guard around every call, and the checks and "
    "records of the home, take the rest.",
    "trips": "not taken apart here.",
    "step": "not taken apart here.",
    "renew": "all other leases are renewed at the same time, in batches, and each batch keeps the event loop.",
    "lease": "the growth of the whole process over 10,000 of them, with what the allocator keeps: runs gave "
    "3.7 to 4.3 KiB, so the goal is met in some and missed in others.",
    "idle": "not taken apart here.",
    "first": "not taken apart here.",
    "vllm": "NixlConnector's fastest requests were faster than kvferry's at TP 1 to 1, and the longest also at TP 2 to "
    "1: it asks nobody whether the blocks still count. Its other requests scatter more: each of its idle agents takes "
    "a core, and there were two cores; at TP 2 to 1 it has three agents.",
    "vllm concurrent": "the table of its page has vLLM's own step, which computes the first token: its attention reads "
    "the whole prompt, however its blocks have come there.",
    "vllm prefix": "the table of its page has the same prompt with the prefix in the engine's own cache: that is "
    "vLLM's step over the last tokens. What a fetch takes longer is its question, its read and the wait for the next "
    "step.",
}
