"""Why a goal is missed: what the limit is, as far as it is known. Written by hand, by the key of the goal in
`benchmarks.goals`; shown only while it is missed. What no measurement of this suite shows is called a guess."""

from __future__ import annotations

_CHECKS = (
    "the server checks the reference's key, makes a lease and its record, and encodes the runs of blocks, where "
    "a bare "
    "server looks at nothing. Which of these costs what is not measured here."
)
_COPY = (
    "raw NIXL's best program itself stays as far below memcpy: UCX copies by process_vm_readv, which alone was "
    "measured at 0.50 to 0.56 of memcpy on this machine, and with two threads at 0.77 to 1.10. A read adds its "
    "chunks and its calls to that."
)
_TWO = "two agents share the read, beside the node server and the source on the same two cores."
_ESTIMATE = (
    "the worst cells lie where the two paths cross. There direct was chosen, and staging was faster in this run. The "
    "constants that decide differ by some tens of percent between calibrations."
)

REMARKS = {
    "read": "its two calls, for the blocks and for the report, cost more than bare ones (see below), and the "
    "movement is a fraction of an echo. The rest is spent in the reader's process; a guess is the handing over between "
    "its threads.",
    "read-after": "its call for the blocks costs more than a bare one; the rest is the reader's process, as above.",
    "ports": "its calls cost more than the bare ones of the sum (see below). The reader's step looks every 0.2 "
    "ms, which "
    "adds to each stage. The rest is not taken apart here.",
    "concurrent": "the node server's CPU per read alone takes several times as long as raw NIXL takes for a "
    "whole read, so "
    "one server process cannot reach the goal at this cost. The reader's own Python shares the two cores with it.",
    "long": _COPY,
    "long-two": f"{_COPY[:-1]}; {_TWO}",
    "scattered": "a read does more than the raw program: it checks every address, posts in chunks, and hands "
    "over between "
    "threads. Which of these costs what is not measured here.",
    "scattered-two": _TWO,
    "tcp": "the movement alone took 1.3 to 1.7 times as long as raw NIXL's, of three samples each. The same movement "
    "alternating with raw NIXL, without the suite, had reached 0.92 of its speed. Why they differ is not known.",
    "tcp-best": "as with the same options; and the fastest segments for long runs were not those that "
    "kvferry sets. Raw NIXL has twelve tries of few samples, of which the fastest counts: chance favours it.",
    "choice": _ESTIMATE,
    "choice-tcp": _ESTIMATE,
    "handshake": "the server decodes the reader's planes, compares them with the source's field by field, and "
    "encodes those "
    "of the source, in Python. A bare stream with messages of the same sizes takes about an echo.",
    "handshakes": "not taken apart here.",
    "blocks": _CHECKS,
    "poll": _CHECKS,
    "publish": "the server decodes and checks every run of blocks, and keeps a record, where a bare server looks at "
    "nothing. Which of these costs what is not measured here.",
    "report": "the server ends the lease and tells the source of the release on its Watch, which is one more message.",
    "cpu": "two bare calls of grpc.aio, one at a time, already take more than the goal on this machine.",
    "trips": "not taken apart here.",
    "step": "not taken apart here.",
    "renew": "all other leases are renewed at the same time, in batches, and each batch keeps the event loop.",
    "lease": "not taken apart here.",
    "idle": "not taken apart here.",
    "first": "not taken apart here.",
}
