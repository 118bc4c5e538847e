"""`kvferry fetch`: writes what an engine has cached of a prompt into a file, for debugging."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvferry._cli.connection import Connection, Directory, look_up, with_connection
from kvferry._cli.render import safe
from kvferry.errors import InvalidInput, PeerRestarted

if TYPE_CHECKING:
    from kvferry._cli.whole_cache import WholeCache, WholeTensor
    from kvferry._client import Client
    from kvferry._directory.directory import Listing
    from kvferry._prompt import Prompt
    from kvferry.engine import Offer
    from kvferry.geometry.model import EngineGeometry

REQUEST = "fetch"
POLL = 0.05  # Seconds between two looks at the read


@with_connection
def fetch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="The engine's reference; -: the first line of standard input is it. With a certificate also "
            "ID@ADDRESS of its home, or ID and a directory.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")],
    given: Annotated[list[str] | None, typer.Argument(metavar="TOKEN", help="Token ids of the prompt.")] = None,
    tokens: Annotated[
        str, typer.Option(metavar="FILE", help="The token ids, such as a JSON list; -: from standard input.")
    ] = "",
    adapter: Annotated[str, typer.Option(metavar="NAME", help="LoRA adapter of the prompt.")] = "",
    first_token: Annotated[int, typer.Option(min=0, metavar="N", help="First token wanted.")] = 0,
    wait: Annotated[
        float, typer.Option(min=0.001, max=2, metavar="SECONDS", help="Time for the engine's answer.")
    ] = 2.0,
    directory: Directory = "",
    *,
    connection: Connection,
) -> None:
    """Write what an engine has cached of a prompt's beginning.

    Asks for the longest prefix, and reads it as an engine of one rank at the same home. The file has a tensor for each
    plane, LAYER/COMPONENT, of the shape [tokens, heads, elements], with the heads of all ranks. If there is nothing to
    read, none is written, and the exit code is 1.
    """
    source = sys.stdin.readline().strip() if source == "-" else source
    prompt = _prompt(given or [], tokens, adapter)
    if first_token >= len(prompt):
        raise typer.BadParameter(f"the prompt has {len(prompt)} tokens", param_hint="--first-token")
    _check(output)
    safetensors = _safetensors()
    asked, engine_id, home = _named(source, directory, connection.timeout)
    with connection.node(home) as node:
        engine = node.geometry(engine_id)

        from kvferry._cli.whole_cache import WholeCache
        from kvferry._client import Client
        from kvferry._integrity.summed_blocks import IntegrityOptions
        from kvferry.geometry.blocks import taken_end

        cache = WholeCache(engine, len(prompt))
        # Where the engine sums what it publishes, the sums are compared.
        with Client(home, tls=node.tls, integrity=IntegrityOptions("full")) as client:
            memory, offer = _read(client, engine, cache, asked, prompt, first_token, wait)
    found = list(cache.tensors(offer.blocks(), first_token, memory.ctypes.data))
    end = taken_end(offer.blocks(), cache.blocks(offer.blocks(), first_token), None)
    about = {
        "engine": engine.engine_id,
        "incarnation": offer.incarnation.hex(),
        "identity": json.dumps(dict(engine.identity)),
        "adapter": adapter,
        "token_ids": json.dumps(prompt.token_ids[:end].tolist()),
        "first_token": str(first_token),
        "formats": json.dumps({tensor.plane.name: tensor.plane.format for tensor in found}),
    }
    _write(safetensors, found, about, output)
    size = sum(tensor.size for tensor in found)
    print(safe(f"{output}: tokens [{first_token}, {end}) of {len(prompt)}, {len(found)} tensors, {size} bytes"))


def _check(output: Path) -> None:
    try:
        # The file would take the place of a device or a pipe.
        free = stat.S_ISREG(output.stat().st_mode)
    except OSError as error:
        free = isinstance(error, FileNotFoundError)
    if not (free and os.access(output.parent, os.W_OK)):
        raise typer.BadParameter(f"cannot write {output}", param_hint="--output")


def _prompt(given: list[str], file: str, adapter: str) -> Prompt:
    from kvferry._prompt import Prompt

    if bool(given) == bool(file):
        raise typer.BadParameter("give either token ids or --tokens FILE", param_hint="--tokens")
    try:
        if file:
            given = re.split(r"[\s,\[\]]+", sys.stdin.read() if file == "-" else Path(file).read_text())
        return Prompt([int(each) for each in given if each], adapter=adapter)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--tokens") from None
    except (ValueError, InvalidInput) as error:
        raise typer.BadParameter(f"these are not the token ids of a prompt: {error}") from None


def _named(source: str, directory: str, timeout: float) -> tuple[str | Listing, str, str]:
    """Return the engine that is asked, its engine_id, and the address of its home."""
    from kvferry._directory.directory import Listing
    from kvferry._wire.reference import ENGINE_PREFIX, format_engine_reference, parse_engine_reference

    try:
        if not source.startswith(ENGINE_PREFIX):
            engine_id, _, home = source.rpartition("@") if "@" in source else (source, "", "")
            listing = Listing(engine_id, home or _home(directory, timeout, engine_id))
            return listing, engine_id, listing.home
        reference = parse_engine_reference(source)
        reference.home = reference.home or _home(directory, timeout, reference.engine_id, reference.incarnation)
    except InvalidInput as error:
        raise typer.BadParameter(str(error), param_hint="ENGINE") from None
    return format_engine_reference(reference), reference.engine_id, reference.home


def _home(directory: str, timeout: float, engine_id: str, incarnation: bytes = b"") -> str:
    if not directory:
        raise typer.BadParameter("it names no home: say ID@ADDRESS, or --directory URL", param_hint="ENGINE")
    return look_up(directory, timeout, lambda listed: listed.resolve(engine_id, incarnation)).home


def _read(
    client: Client,
    engine: EngineGeometry,
    cache: WholeCache,
    asked: str | Listing,
    prompt: Prompt,
    first_token: int,
    wait: float,
) -> tuple[Any, Offer]:
    """Ask for a prefix, and read it. Return the memory of the cache, ``uint8[size]``, and what was read."""
    import numpy as np

    from kvferry._engine_spec import EngineSpec
    from kvferry.engine import SchedulerPort, WorkerPort

    try:
        memory = np.zeros(cache.size, np.uint8)
    except MemoryError:
        _fail(f"no memory for {cache.size} bytes, the cache of {len(prompt)} tokens")
    name = f"fetch-{secrets.token_hex(4)}"
    # An engine that holds a part of the model only can be read, too.
    spec = EngineSpec(name, cache.groups, identity=engine.identity, partial=True)
    # Closing the port gives back what is not read.
    with SchedulerPort(client, spec) as port, WorkerPort(client, spec) as worker:
        worker.register({name: memory}, planes=cache.planes(memory.ctypes.data), serve=False)
        port.ask(REQUEST, asked, prompt, first_token=first_token, wait=wait)
        while (offer := port.granted(REQUEST)) is None:
            port.wait_news(POLL)
        if offer.incarnation != engine.incarnation:
            raise PeerRestarted(
                f"engine {engine.engine_id!r} has restarted, and may hold other planes now: fetch again",
                engine_id=engine.engine_id,
                incarnation=engine.incarnation.hex(),
                current=offer.incarnation.hex(),
            )
        worker.start(port.attach(REQUEST, cache.blocks(offer.blocks(), first_token)))
        while not (ends := port.finished().reads):
            port.wait_news(POLL)
            for read_id in port.cancels():
                worker.cancel(read_id)
            port.collect(worker.finished())
    if ends[0].error is not None:
        raise ends[0].error
    return memory, offer


def _write(safetensors: Any, found: Iterable[WholeTensor], about: dict[str, str], output: Path) -> None:
    """Write the tensors; the file appears when it is whole."""
    specs = {
        tensor.plane.name: safetensors.TensorSpec(
            dtype=tensor.dtype, shape=tensor.shape, data_ptr=tensor.address, data_len=tensor.size
        )
        for tensor in found
    }
    part = output.with_name(f".kvferry-{secrets.token_hex(4)}.part")
    try:
        safetensors.serialize_file(specs, part, about)
        part.replace(output)
    except (OSError, safetensors.SafetensorError) as error:
        _fail(f"cannot write {output}: {error}")
    finally:
        part.unlink(missing_ok=True)


def _fail(problem: str) -> NoReturn:
    print(safe(f"kvferry: {problem}"), file=sys.stderr)
    raise typer.Exit(1) from None


def _safetensors() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise typer.BadParameter(
            "it needs safetensors: pip install 'kvferry[fetch,nixl]'", param_hint="--output"
        ) from None
    return safetensors
