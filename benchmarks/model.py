"""On paper: what control costs where cards of 400 Gbit/s move the bytes, and in a fleet of 1,000 nodes. Computed from
the constants in the results; nothing here was measured at that size."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.homes import HOMES, cpu_label, rate_label
from benchmarks.results import Results
from benchmarks.tables import Table

CARD = 400e9 / 8
"""Bytes per second of a card of 400 Gbit/s."""
SHARE = 0.9
"""What of it arrives as KV cache."""
RENEW_EVERY = 10.0
"""Seconds; a third of the default ttl."""
CALLS = 2
"""Calls of a short request at the source's home: publish, validate. The release comes on an open stream."""
RANKS = 8
"""Ranks of an engine; each node has one engine."""
NODES = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of request.

    Attributes:
        label: the model, and the length of the prompt.
        bytes: of its KV cache, over all ranks.
    """

    label: str
    bytes: float


LOADS = (
    Load("Llama-3-8B, 512 tokens", 512 * 2 * 32 * 8 * 128 * 2),
    Load("Llama-3-8B, 8,192 tokens", 8192 * 2 * 32 * 8 * 128 * 2),
    Load("Llama-3-70B, 4,096 tokens", 4096 * 2 * 80 * 8 * 128 * 2),
    Load("DeepSeek-V3 (latent), 2,048 tokens", 2048 * 61 * 576 * 2),
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the model takes from the results; seconds of the node server's CPU, and bytes.

    Attributes:
        request: seconds of a request's two calls when many run at once.
        single: the same, one at a time: more, since the server sleeps and wakes for each.
        renewal: seconds of a renewal in a batch.
        handshake: seconds of a handshake, per rank of the source that is told.
        control: bytes of a request's messages.
        told: bytes of a handshake's answer, per rank of the source.
        lease: bytes of memory of a lease and its publication.
    """

    request: float
    single: float
    renewal: float
    handshake: float
    control: float
    told: float
    lease: float

    @classmethod
    def of(cls, results: Results) -> Costs:
        """From the results."""
        told = 128
        return cls(
            # Measured of a read's one call; the other, publish, is taken to cost as much.
            request=results.measure("small_reads", "node server's CPU per read, 16 at once").median * CALLS,
            single=results.measure("server_calls", "node server's CPU per request of two calls").median,
            renewal=results.measure("server_calls", "node server's CPU per renewal, in batches").median,
            handshake=results.measure("handshakes", "node server's CPU per handshake of these").median / told,
            control=results.measure("server_calls", "bytes of control per request").median,
            told=results.measure("handshakes", "bytes of one of their answers").median / told,
            lease=sum(
                results.measure("fleet", name).median
                for name in ("memory per lease", "memory per publication of 16 scattered blocks")
            ),
        )


def at_line_rate(costs: Costs) -> Table:
    """Requests that fill a node's card, and what they ask of its home."""
    rows = []
    for load in LOADS:
        rate = CARD * SHARE / load.bytes
        # A read lasts as long as its bytes take; a lease is renewed only if that is long.
        cells = (
            f"{load.bytes / 2**20:,.0f} MiB",
            f"{rate:,.1f}",
            f"{100 * rate * costs.control / CARD:.4f} %",
            f"{rate * costs.request:.2f}",
        )
        rows.append((load.label, *cells))
    columns = ("requests", "bytes each", "requests/s", "control, of the card", "cores of a home")
    return Table("What fills the card of a node", columns, rows)


def fleet(costs: Costs) -> Table:
    """A thousand nodes, half of them sources, each engine of 8 ranks read by all others."""
    readers = NODES // 2 * RANKS
    rows = [
        ("requests/s that one core of a home serves", f"{1 / costs.request:,.0f}"),
        ("bytes of control per request, of 256 scattered blocks", f"{costs.control:,.0f} B"),
        (
            f"a source restarts, and {readers:,} ranks of {NODES // 2} readers handshake with its {RANKS} ranks: "
            f"its home's CPU",
            f"{readers * RANKS * costs.handshake:,.1f} s",
        ),
        ("the same: bytes that its home sends", f"{readers * RANKS * costs.told / 2**20:,.0f} MiB"),
        (
            "10,000 leases that are renewed every 10 s: share of a core",
            f"{100 * 10_000 * costs.renewal / RENEW_EVERY:,.1f} %",
        ),
        ("10,000 leases and their publications: memory", f"{10_000 * costs.lease / 2**20:,.0f} MiB"),
    ]
    return Table(f"A fleet of {NODES:,} nodes", ("", "by the model"), rows)


def check(costs: Costs, results: Results) -> Table:
    """The two constants for the CPU of a call, and what they predict of sixteen reads at once, beside what was
    measured."""
    measured = results.measure("small_reads", "16 concurrent readers").median
    rows = [
        ("the home's CPU per call, in single requests", f"{1e3 * costs.single / CALLS:.2f} ms"),
        ("the home's CPU per call, sixteen reads at once", f"{1e3 * costs.request / CALLS:.2f} ms"),
        ("16 reads at once per second, predicted from single requests", f"{CALLS / costs.single:,.0f}"),
        (
            "the same, predicted from sixteen at once, if nothing but the home bounded it",
            f"{CALLS / costs.request:,.0f}",
        ),
        ("the same, measured; reader and home shared two cores", f"{measured:,.0f}"),
    ]
    return Table("The model against what was measured", ("", ""), rows)


def bottleneck(costs: Costs) -> str:
    """Where the first bottleneck is, in words."""
    rate = 1 / costs.request
    one = CARD * SHARE * costs.request
    return (
        f"A home is one event loop on one core, which serves {rate:,.0f} requests per second. So a node with one card "
        f"fills it before its home is full if a request has more than {one / 2**20:,.0f} MiB, and one with eight cards "
        f"if it has more than {8 * one / 2**20:,.0f} MiB. Below that the home's CPU is the first bottleneck, and the "
        "bytes of control never: at that size "
        f"they are {100 * costs.control / one:.4f} % of the bytes of one card."
    )


def several_homes(results: Results) -> Table:
    """What requests cost at one home, and at several that share a node's engines."""
    rows = []
    for count in HOMES:
        cpu, rate = results.measure("homes", cpu_label(count)), results.measure("homes", rate_label(count))
        rows.append((str(count), f"{1e3 * cpu.median:.2f} ms", f"{rate.median:,.0f}"))
    return Table("", ("homes", "CPU of all homes per request", "requests/s"), rows)


def at_most_homes(results: Results) -> str:
    """The same of one home and of the most, in words."""
    one, most = (1e3 * results.measure("homes", cpu_label(count)).median for count in (1, max(HOMES)))
    return f"Measured: {one:.2f} ms of CPU for a short request at one home, {most:.2f} ms at {max(HOMES)}."
