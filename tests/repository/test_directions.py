"""Folders are layers (docs/architecture.md): what may import what, and what must stay pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.repository import ROOT, syntax

CLIENT = ROOT / "client" / "kvferry"
SERVER = ROOT / "server" / "kvferry_server"

SMALL = {
    "_arguments",
    "_clock",
    "_logs",
    "_threads",
    "_forks",
    "_loop",
    "_engine_spec",
    "_prompt",
    "host_memory",
    "stats",
    "_summaries",
    "_tracing",
}
"""Single modules, each with its rule in `MAY_IMPORT`."""

BASE = {"errors", "_arguments", "_clock", "_logs", "_threads", "_forks"}
PURE = {"errors", "_arguments", "geometry", "planner", "_engine_spec", "_prompt", "stats"}
MAY_IMPORT: dict[str, set[str]] = {
    "v1": set(),
    "errors": set(),
    "_clock": {"errors"},
    "_arguments": {"errors"},
    "_logs": set(),
    "_threads": {"errors", "_logs"},
    "_forks": {"errors", "_loop"},
    "_loop": {"errors", "_clock", "_logs", "_threads"},
    "stats": set(),
    "_tracing": {"errors", "_threads"},
    "geometry": {"errors", "_arguments"},
    "_engine_spec": {"errors", "_arguments", "geometry"},
    "_prompt": {"errors", "_arguments"},
    "host_memory": {"errors", "_arguments", "geometry"},
    "planner": {"errors", "_arguments", "geometry"},
    "_memory": {"errors", "_arguments", "_logs", "_engine_spec", "geometry", "planner"},
    "_transport": {*BASE, "stats", "geometry", "planner", "_memory"},
    "_wire": {*BASE, "geometry", "_prompt", "v1"},
    "_directory": {*BASE, "_wire"},
    "_summaries": {"errors", "_clock", "_wire", "v1"},
    "_control": {
        *BASE,
        "_loop",
        "stats",
        "_tracing",
        "geometry",
        "_engine_spec",
        "_prompt",
        "_wire",
        "_directory",
        "v1",
    },
    "_integrity": {
        *BASE,
        "_loop",
        "geometry",
        "planner",
        "_engine_spec",
        "_memory",
        "_wire",
        "_control",
        "v1",
    },
    "_reads": {
        *BASE,
        "_integrity",
        "_loop",
        "stats",
        "_tracing",
        "geometry",
        "planner",
        "_engine_spec",
        "_prompt",
        "_memory",
        "_transport",
        "_wire",
        "_control",
        "v1",
    },
}
BELOW = set(MAY_IMPORT) - {"v1"}
"""What the faces stand on. Messages are for `_wire`, `_control` and `_reads`; the command line reads introspection."""
FACES = {
    "_network": {"errors", "planner", "_clock", "_loop", "_transport", "_wire"},
    "_session": BELOW,
    "_cache": {*BELOW, "_session"},
    "_client": {*BELOW, "_network", "_session", "_cache"},
    "_embed": {"errors", "_forks", "_logs"},
    "aio": {*BELOW, "_session", "_cache", "_client", "engine"},
    "engine": {*BELOW, "_session", "_cache", "_client"},
    "testing": {*BELOW, "_client", "_network", "aio"},
    # Public modules, see `PRIVATE_TO_INTEGRATIONS`.
    "integrations": {"errors", "geometry", "engine", "stats", "testing", "_threads", "_tracing"},
    "_doctor": {"errors", "geometry", "planner", "host_memory", "_transport", "_wire", "v1"},
    "_cli": {*MAY_IMPORT, "_session", "_cache", "_client", "engine", "_doctor"},
}
RULES = {**MAY_IMPORT, **FACES}
PRIVATE_TO_INTEGRATIONS = {
    "otel.py": {
        "kvferry._tracing": "the hook for spans: OpenTelemetry is the one way to trace that is supported",
        "kvferry._threads": "what an application's span processor raises ends no read, as all that it raises elsewhere",
    },
}
"""What the integrations import of private modules, by file, and why. They are the proof that the author of an engine
needs none, so engines are not among them."""
RUN_A_HOME = {"_embed", "testing"}
"""What may import the server: nothing that an engine runs in production."""
HEAVY = {"grpc", "nixl", "torch", "asyncio", "threading", "google"}
OF_THE_SDK = (PURE - {"_engine_spec"}) | {
    "_wire",
    "_directory",
    "_clock",
    "_summaries",
    "_tracing",
    "v1",
}
"""What the server may use of it."""
SERVER_RULES = {
    "domain": set[str](),
    "home": {"domain"},
    "servicers": {"domain", "home"},
    "admin": {"domain", "home", "servicers"},
    "node": {"domain", "home", "servicers", "admin"},
}


def imports(path: Path, package: Path) -> Iterator[str]:
    """Modules that a file imports, those that are only for types included."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inside = package.parent.joinpath(*whole.split("."))
                yield whole if inside.is_dir() or inside.with_suffix(".py").is_file() else node.module


def files(package: Path) -> Iterator[tuple[str, Path]]:
    """The files of a package, with the folder or single module that each belongs to."""
    for path in sorted(package.rglob("*.py")):
        top = path.relative_to(package).parts[0].removesuffix(".py")
        if top not in ("__init__", "v1"):
            yield top, path


def folders(package: Path) -> set[str]:
    return {top for top, _ in files(package)}


def test_folders_all_have_a_rule() -> None:
    assert folders(CLIENT) | {"v1"} == set(RULES)
    assert folders(SERVER) == set(SERVER_RULES)


@pytest.mark.parametrize("folder", sorted(set(RULES) - {"v1"}))
def test_imports_point_downwards(folder: str) -> None:
    for top, path in files(CLIENT):
        if top != folder:
            continue
        for name in imports(path, CLIENT):
            package, _, rest = name.partition(".")
            assert package != "kvferry_server" or folder in RUN_A_HOME, f"{path} imports {name}"
            if package == "kvferry" and rest:
                target = rest.split(".")[0]
                assert target == folder or target in RULES[folder], f"{path} imports {name}"


def test_integrations_import_public_modules_only() -> None:
    folder = CLIENT / "integrations"
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        private = {
            module
            for module in imports(path, CLIENT)
            if module.startswith("kvferry.") and any(part.startswith("_") for part in module.split("."))
        }
        assert private == set(PRIVATE_TO_INTEGRATIONS.get(name, ())), path


@pytest.mark.parametrize("folder", sorted(SERVER_RULES))
def test_imports_of_the_server_point_downwards(folder: str) -> None:
    for top, path in files(SERVER):
        if top != folder:
            continue
        for name in imports(path, SERVER):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package == "kvferry_server" and rest:
                assert target == folder or target in SERVER_RULES[folder], f"{path} imports {name}"
            if package == "kvferry" and rest:
                assert target in OF_THE_SDK, f"{path} imports {name}"


@pytest.mark.parametrize("package", [CLIENT, SERVER], ids=["client", "server"])
def test_imports_have_no_cycles(package: Path) -> None:
    graph: dict[str, set[str]] = {}
    for _, path in files(package):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {found for found in imports(path, package) if found.startswith(f"{package.name}.")} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", sorted(PURE))
def test_pure_folders_know_neither_grpc_nor_nixl_nor_torch(folder: str) -> None:
    for top, path in files(CLIENT):
        if top == folder:
            assert not {name.split(".")[0] for name in imports(path, CLIENT)} & HEAVY, path


def test_domain_of_the_server_knows_neither_grpc_nor_asyncio() -> None:
    for top, path in files(SERVER):
        if top == "domain":
            assert not {name.split(".")[0] for name in imports(path, SERVER)} & (HEAVY - {"google"}), path


def test_nixl_is_imported_in_one_file() -> None:
    """Also not by name: the names of NIXL's packages count."""
    loads = re.compile(r"""^\s*(import|from) nixl|["']nixl(_cu\d+|_rocm)["']""", re.MULTILINE)
    sources = [*CLIENT.rglob("*.py"), *SERVER.rglob("*.py")]
    assert [path.name for path in sources if loads.search(path.read_text())] == ["nixl_binding.py"]


@pytest.mark.parametrize("package", [CLIENT, SERVER], ids=lambda path: path.name)
def test_class_names_are_unique(package: Path) -> None:
    """A name stands for one thing wherever it is read."""
    sources = [path for path in package.rglob("*.py") if path.parent.name != "v1"]
    names = Counter(name for path in sources for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_grpc_tools_is_never_imported() -> None:
    for folder in ("client", "server", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if "node_modules" not in path.parts:
                assert not any(name.startswith("grpc_tools") for name in imports(path, CLIENT)), path


@pytest.mark.parametrize(
    "statement",
    ["import kvferry", "from kvferry import Client", "import kvferry._cli", "import kvferry.planner"],
)
def test_import_of_the_sdk_needs_neither_torch_nor_nixl(statement: str) -> None:
    heavy = "('torch', 'nixl', 'nixl_cu12', 'nixl_cu13')"
    code = f"{statement}\nimport sys\nprint([name for name in sys.modules if name.split('.')[0] in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nixl_is_loaded_without_a_cpu_build_of_torch() -> None:
    """``nixl`` would import it, only to learn that there is no CUDA: seconds for each process."""
    code = (
        "from kvferry._transport.nixl_binding import load\nimport sys\nprint(load().__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    binding, torch = done.stdout.split()
    assert binding.startswith("nixl")
    assert torch == str(not metadata.version("torch").endswith("+cpu"))
