"""`kvferry demo`: moves requests between two engines on this machine and checks every byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry._cli.render import sentences

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry._demo.run import DemoOutcome
    from kvferry.geometry.model import EngineGeometry
    from kvferry.planner.line_rule import Stripe

BLOCK_SIZE = 16
LLAMA_3_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "attention": "gqa"}


def default_geometry(engine_id: str, tp_size: int, requests: int, tokens: int) -> dict[str, Any]:
    """Return the geometry of Llama-3-8B with as many blocks as the requests need, so that it fits a small machine."""
    return {
        "engine_id": engine_id,
        "tp_size": tp_size,
        "pp_size": 1,
        "layout": "HND",
        "block_size": BLOCK_SIZE,
        "num_blocks": _blocks_needed(requests, tokens, BLOCK_SIZE),
        "model": LLAMA_3_8B,
    }


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

    It starts two node servers and two engines as processes of their own, moves several requests from one engine to the
    other over real NIXL, and verifies every byte. It leaves nothing behind: no process, socket or memory.
    """
    from rich.console import Console

    from kvferry._demo.run import DemoReporter, run_demo
    from kvferry.errors import KvferryError

    console = Console(stderr=as_json)
    try:
        engines = (
            _geometry(source, default_geometry("prefill", 4, requests, tokens), requests, tokens),
            _geometry(destination, default_geometry("decode", 2, requests, tokens), requests, tokens),
        )
        _introduce(console, *engines)
        with _bar(console) as bar:
            task = bar.add_task("starting", total=None)

            def phase(text: str) -> None:
                if not console.is_terminal:
                    # There is no bar; a log gets a line per phase.
                    console.print(text)
                    return
                # Another phase's bytes are not this one's.
                bar.tasks[task].total, bar.tasks[task].completed = None, 0
                bar.update(task, description=text)

            report = DemoReporter(
                phase=phase,
                total=lambda count: bar.update(task, total=count),
                done=lambda count: bar.update(task, completed=count),
            )
            outcome = run_demo(*engines, requests=requests, tokens=tokens, ucx_tls=ucx_tls, seed=seed, report=report)
    except KvferryError as error:
        typer.echo(f"kvferry demo: {sentences(error)}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("kvferry demo: interrupted; everything it started has ended", err=True)
        raise typer.Exit(130) from None
    if as_json:
        json.dump(_as_json(outcome), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _conclude(console, outcome)
    if outcome.failures:
        for failure in outcome.failures:
            typer.echo(f"kvferry demo: {failure}", err=True)
        raise typer.Exit(1)


def _geometry(file: Path | None, default: dict[str, Any], requests: int, tokens: int) -> EngineGeometry:
    from kvferry.geometry import file as geometry_file

    if file is None:
        return geometry_file.parse(default)
    geometry_file.load(file)  # says what is wrong with the file as it stands
    return geometry_file.parse(_with_fewer_blocks(json.loads(file.read_text()), requests, tokens))


def _with_fewer_blocks(document: dict[str, Any], requests: int, tokens: int) -> dict[str, Any]:
    """Return the geometry with as many blocks as the requests need: a real engine's cache may not fit this machine."""
    groups = document.get("groups", [])
    sizes = [part["block_size"] for part in (document, *groups) if "block_size" in part]
    # All groups may share one pool.
    most = _blocks_needed(requests, tokens, min(sizes, default=1)) * max(1, len(groups))

    def capped(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "num_blocks": min(part["num_blocks"], most)} if "num_blocks" in part else part

    return {**capped(document), "groups": [capped(group) for group in groups]} if groups else capped(document)


def _blocks_needed(requests: int, tokens: int, block_size: int) -> int:
    """Blocks for the requests and the first small one, with two to spare for each, and a null block."""
    return (requests + 1) * (-(-tokens // block_size) + 2) + 1


def _bar(console: Console) -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, Task, TextColumn, TransferSpeedColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        """Shows nothing in a phase that moves no bytes."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.total else Text()

    class Speed(TransferSpeedColumn):
        """Shows nothing in a phase that moves no bytes, or has moved none yet."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.total and task.completed else Text()

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<34}"),
        BarColumn(),
        Bytes(binary_units=True),
        Speed(),
        console=console,
        transient=True,
    )


def _introduce(console: Console, source: EngineGeometry, destination: EngineGeometry) -> None:
    for role, engine in (("source", source), ("destination", destination)):
        layers = len({plane.layer for _, plane in engine.planes()})
        groups = ", ".join(f"{g.name}: {g.num_blocks} blocks of {g.block_tokens or 1}" for g in engine.groups)
        console.print(
            f"{role:<12} {engine.engine_id}: {len(engine.ranks)} ranks, {layers} layers; {groups}", highlight=False
        )


def _conclude(console: Console, outcome: DemoOutcome) -> None:
    from rich.table import Table

    table = Table(title="who read what from whom", title_justify="left")
    for column in ("rank", "from", "units", "blocks"):
        table.add_column(column)
    table.add_column("MiB", justify="right")
    for rank, plan in outcome.plans.items():
        labels = {source.rank: source.label for source in plan.source.ranks}
        for source_rank in plan.source_ranks:
            reads = [read for read in plan.reads if read.source_rank == source_rank]
            units = sorted({(read.units.begin, str(read.units)) for read in reads})
            stripes = sorted({_share(read.stripe) for read in reads})
            table.add_row(
                plan.rank.label,
                labels[source_rank],
                ", ".join(text for _, text in units),
                ", ".join(stripes),
                f"{outcome.by_source[rank][source_rank] / 2**20:,.0f}",
            )
    console.print(table)
    moved = [item for items in outcome.moved.values() for item in items]
    verified = outcome.verified.values()
    rate = outcome.total_bytes / outcome.seconds if outcome.seconds else 0.0
    pieces, descriptors = sum(item.pieces for item in moved), sum(item.descriptors for item in moved)
    released = ", ".join(sorted({release.outcome.name for release in outcome.releases})) or "none"
    lines = (
        f"first read   {outcome.first_contact:.2f} s with handshakes, agents and connections; not counted below",
        f"moved        {outcome.total_bytes / 2**20:,.0f} MiB in {len(moved)} reads, {outcome.seconds:.2f} s",
        f"descriptors  {descriptors:,} for {pieces:,} contiguous pieces",
        f"speed        {rate / 1e9:.2f} GB/s, {100 * rate / outcome.memcpy_rate:.0f} % of one thread's memcpy "
        f"({outcome.memcpy_rate / 1e9:.2f} GB/s in the same run)",
        f"verified     {sum(v.right for v in verified):,} bytes right, {sum(v.wrong for v in verified):,} wrong, "
        f"{sum(v.strayed for v in verified):,} written where nobody asked",
        f"released     {len(outcome.releases)} publications: {released}",
    )
    for line in lines:
        console.print(line, highlight=False)
    if not outcome.failures and not any(v.wrong or v.strayed for v in verified):
        console.print("Every byte is right.", style="bold green")


def _share(stripe: Stripe) -> str:
    return "all" if stripe.whole else f"{stripe.begin}/{stripe.of} to {stripe.end}/{stripe.of}"


def _as_json(outcome: DemoOutcome) -> dict[str, object]:
    return {
        "bytes": outcome.total_bytes,
        "first_contact_seconds": outcome.first_contact,
        "seconds": outcome.seconds,
        "memcpy_bytes_per_second": outcome.memcpy_rate,
        "released": len(outcome.releases),
        "ranks": [
            {
                "rank": rank,
                "source_ranks": list(plan.source_ranks),
                "bytes_by_source": {str(source): count for source, count in outcome.by_source[rank].items()},
                "reads": [
                    {"request": m.request, "bytes": m.bytes, "descriptors": m.descriptors, "error": m.error}
                    for m in outcome.moved[rank]
                ],
                "right": outcome.verified[rank].right,
                "wrong": outcome.verified[rank].wrong,
                "strayed": outcome.verified[rank].strayed,
            }
            for rank, plan in outcome.plans.items()
        ],
        "failures": outcome.failures,
    }
