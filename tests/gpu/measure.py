"""How fast KV cache moves between two processes on one device, against a copy of as many bytes in the same run."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import kvferry
from tests.gpu.device_engines import DeviceEngine, Processes, engines_of
from tests.gpu.rank_process import Settings
from tests.gpu.report import Table
from tests.gpu.torch_caches import Shape
from tests.gpu.transports import transports_of

ON_DEVICE = Shape(layers=32, heads=8, head_dim=128, num_blocks=512)
ON_HOST = Shape(layers=4, heads=8, head_dim=128, num_blocks=64)
REPEATS = 5
Make = Callable[..., DeviceEngine]


def measure(device: str) -> list[Table]:
    """Measure everything. Raises `ValueError` if wrong bytes arrive."""
    shape = ON_HOST if device == "cpu" else ON_DEVICE
    with (
        tempfile.TemporaryDirectory() as folder,
        kvferry.serve(listen="127.0.0.1:0", unix="", drain=1.0) as node,
        kvferry.Client(node.address) as client,
    ):
        processes = Processes(Path(folder))
        try:
            with engines_of(client, node.address, processes) as make:
                rates = _rates(make, device, shape)
            with engines_of(client, node.address, processes) as make:
                contact = _first_contact(make, device, shape)
        finally:
            processes.close()
    return [rates, contact]


def _rates(make: Make, device: str, shape: Shape) -> Table:
    size = shape.num_blocks // 2 * shape.block_tokens * shape.token_bytes
    contiguous = tuple(range(shape.num_blocks // 2))
    scattered = tuple(random.Random(0).sample(range(shape.num_blocks), shape.num_blocks // 2))
    staged = Settings(staging={"path": "staged"})
    rows: list[tuple[str, ...]] = []
    copied = 0.0
    for name, environment in transports_of(device).items():
        source = make([device], shape, environment=environment).ready()
        source.all("fill", 1)
        if not copied:
            copied = statistics.median(source.all("time_copies", size, REPEATS + 1)[0][1:])
            rows.append(("copy on the device, one piece", f"{size / copied / 1e9:.2f}", "1", _ms(copied), "", ""))
        cases = [("one run of blocks", contiguous, "heads first", Settings(), device)]
        cases += [("scattered blocks", scattered, "heads first", Settings(), device)]
        if name == "as UCX chooses":
            cases += [("one run of blocks, to the host", contiguous, "heads first", Settings(), "cpu")]
            cases += [("tokens first, direct", scattered, "tokens first", Settings(staging={"path": "direct"}), device)]
            cases += [("tokens first, staged", scattered, "tokens first", staged, device)]
        for label, ids, layout, settings, to in cases:
            rows.append(_row(make, source, f"{label}: {name}", ids, layout, settings, to, environment, copied))
    title = f"Reads of {size >> 20:,} MiB: {shape.layers} layers, {shape.heads} heads of {shape.head_dim}, bfloat16"
    return Table(title, ("", "GB/s", "× copy", "ms", "descriptors", "staged"), rows)


def _row(
    make: Make,
    source: DeviceEngine,
    label: str,
    ids: tuple[int, ...],
    layout: str,
    settings: Settings,
    device: str,
    environment: Mapping[str, str],
    copied: float,
) -> tuple[str, ...]:
    destination = make([device], source.shape, layout, environment=environment, settings=settings).ready()
    publication = source.session.publish(label, {"full": kvferry.Blocks(ids)}, expected_reads=REPEATS + 1)
    end = len(ids) * source.shape.block_tokens
    # Into other blocks than they come from, in another order.
    here = ids[1:] + ids[:1]
    ((taken, result),) = destination.all("time_reads", publication.reference, here, end, REPEATS + 1)
    if source.all("digest", ids) != destination.all("digest", here):
        raise ValueError(f"{label}: the bytes that have arrived are not those of the source")
    seconds = statistics.median(taken[1:])
    return (
        label,
        f"{result.bytes / seconds / 1e9:.2f}",
        f"{copied / seconds:.2f}",
        _ms(seconds),
        f"{result.descriptors:,}",
        f"{result.staged_bytes / result.bytes:.0%}",
    )


def _first_contact(make: Make, device: str, shape: Shape) -> Table:
    """How long registering and the first read take, in processes that did neither before."""
    small = Shape(shape.layers, shape.heads, shape.head_dim, shape.block_tokens, num_blocks=8)
    rows = []
    for warmed in (False, True):
        environment = {"KVFERRY_TEST_PROCESS": f"first contact {warmed}"}
        source = make([device], small, environment=environment).ready()
        destination = make([device], small, environment=environment)
        # Its process has started, and torch is imported, when this is answered.
        began = time.perf_counter()
        destination.ready()
        registered = time.perf_counter() - began
        source.all("fill", 1)
        publication = source.session.publish("first", {"full": kvferry.Blocks(range(4))}, expected_reads=4)
        if warmed:
            destination.all("warm", source.session.engine_reference)
        ids, end = (0, 1, 2, 3), 4 * small.block_tokens
        ((taken, _),) = destination.all("time_reads", publication.reference, ids, end, 4)
        rows.append(("warmed up before" if warmed else "cold", _ms(registered), _ms(taken[0]), _ms(taken[-1])))
    columns = ("", "process, torch, registration: ms", "first read: ms", "fourth read: ms")
    return Table(f"First contact, {4 * small.block_tokens * small.token_bytes >> 10:,} KiB", columns, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
