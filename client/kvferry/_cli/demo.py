"""`kvferry demo`: moves requests between two engines on this machine and checks every byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry._cli.render import safe, sentences
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry._demo.run import DemoOutcome
    from kvferry.geometry.model import EngineGeometry

LLAMA_3_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "attention": "gqa"}
DEFAULT = {"pp_size": 1, "layout": "HND", "block_size": 16, "num_blocks": 1 << 20, "model": LLAMA_3_8B}


def demo(
    source: Annotated[
        Path | None, typer.Option(help="Geometry file of the engine that is read from. Default: Llama-3-8B, TP4.")
    ] = None,
    destination: Annotated[
        Path | None, typer.Option(help="Geometry file of the engine that reads. Default: Llama-3-8B, TP2.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests moved at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each request, about.")] = 512,
    ucx_tls: Annotated[str, typer.Option(help="UCX transports, e.g. tcp. Default: what UCX chooses.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the block tables.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Move requests between two engines on this machine.

    It starts two node servers, and the ranks of two engines as processes of their own, moves several requests from one
    engine to the other over real NIXL, and verifies every byte. It leaves nothing behind: no process, socket or memory.
    """
    from rich.console import Console

    from kvferry._demo.run import run_demo
    from kvferry.planner import plan_read, to_text

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        theirs, mine = (
            _geometry(file, {**DEFAULT, "engine_id": name, "tp_size": size}, requests, tokens)
            for file, name, size in ((source, "prefill", 4), (destination, "decode", 2))
        )
        for role, engine in (("source", theirs), ("destination", mine)):
            layers = len({plane.layer for _, plane in engine.planes()})
            groups = ", ".join(f"{g.name}: {g.num_blocks} blocks of {g.block_tokens or 1}" for g in engine.groups)
            console.print(f"{role:<12} {engine.engine_id}: {len(engine.ranks)} ranks, {layers} layers; {groups}")
        plans = [plan_read(theirs, mine, rank.rank) for rank in mine.ranks]
        # Names in geometry files may be anything, and must not control the terminal.
        console.print("", *map(safe, to_text(plans).splitlines()), "", sep="\n", markup=False)
        outcome = run_demo(
            theirs, mine, requests=requests, tokens=tokens, ucx_tls=ucx_tls, seed=seed, phase=console.print
        )
    except KvferryError as error:
        typer.echo(f"kvferry demo: {sentences(error)}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("kvferry demo: interrupted; everything it started has ended", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(outcome), indent=2))
    else:
        _conclude(console, outcome)
    for failure in outcome.failures:
        typer.echo(f"kvferry demo: {failure}", err=True)
    if outcome.failures:
        raise typer.Exit(1)


def _geometry(file: Path | None, document: dict[str, Any], requests: int, tokens: int) -> EngineGeometry:
    """Return a geometry with only as many blocks as the requests need: a real engine's cache may not fit this
    machine."""
    from kvferry.geometry import file as geometry_file

    if file is not None:
        geometry_file.load(file)  # says what is wrong with the file as it stands
        document = json.loads(file.read_text())
    groups = document.get("groups", [])
    smallest = min((part["block_size"] for part in (document, *groups) if "block_size" in part), default=1)
    # Also for the small first request, with two spare blocks for each request, and a null block. All groups may share
    # one pool.
    most = ((requests + 1) * (-(-tokens // smallest) + 2) + 1) * max(1, len(groups))
    for part in (document, *groups):
        # A null block at the old end moves to the new end.
        for name, limit in (("num_blocks", most), ("null_block", most - 1)):
            if name in part:
                part[name] = min(part[name], limit)
    return geometry_file.parse(document)


def _conclude(console: Console, outcome: DemoOutcome) -> None:
    reads = [read for rank in outcome.ranks for read in rank.reads]
    descriptors, pieces = sum(read.descriptors for read in reads), sum(read.pieces for read in reads)
    right, wrong, strayed = (
        sum(getattr(rank, name) for rank in outcome.ranks) for name in ("right", "wrong", "strayed")
    )
    rate, memcpy = outcome.bytes / outcome.seconds, outcome.memcpy_bytes_per_second
    for line in (
        f"first read   {outcome.first_contact_seconds:.2f} s with handshakes, agents and connections; not "
        "counted below",
        f"moved        {outcome.bytes / 2**20:,.0f} MiB in {len(reads)} reads, {outcome.seconds:.2f} s",
        f"descriptors  {descriptors:,} for {pieces:,} contiguous pieces",
        f"speed        {rate / 1e9:.2f} GB/s, {100 * rate / memcpy:.0f} % of one thread's memcpy ({memcpy / 1e9:.2f} "
        "GB/s in the same run)",
        f"verified     {right:,} bytes right, {wrong:,} wrong, {strayed:,} written where nobody asked",
        f"released     {outcome.released} publications: {', '.join(outcome.released_as) or 'none'}",
    ):
        console.print(line)
    if not outcome.failures:
        console.print("Every byte is right.", style="bold green")
