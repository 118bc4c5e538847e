"""The import directions of DESIGN §7: what must stay pure stays pure, and NIXL and grpc_tools stay where they are
safe."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client" / "kvferry"
SERVER = ROOT / "server" / "kvferry_server"

# From the bottom up: a module may import modules of its own layer and of those above it in this list.
LAYERS = [
    {"v1"},
    {"errors", "clock", "authority"},
    {"geometry", "sharding"},
    {
        "blocks",
        "codec",
        "descriptors",
        "reference",
        "overlaps",
        "shares",
        "covering",
        "tensors",
        "formats",
        "geometry_file",
        "host_memory",
        "spec",
    },
    {
        "line",
        "rows",
        "lanes",
        "needed",
        "segments",
        "tables",
        "expand",
        "plan",
        "compat",
        "explain",
        "svg",
        "staged",
        "paths",
        "checksums",
        "integrity",
    },
    {
        "status",
        "handshaking",
        "channel",
        "leases",
        "judgement",
        "offers",
        "defence",
        "nixl_options",
        "agents",
        "links",
        "reading",
        "tracking",
        "transfers",
        "permute",
        "summing",
        "staging",
        "measuring",
    },
    {
        "breaker",
        "checksumming",
        "verifying",
        "reporting",
        "acquiring",
        "control",
        "homes",
        "peers",
        "read",
        "reader",
        "rank_reads",
        "lease_holder",
        "tails",
        "renewals",
        "watching",
        "session",
        "cache",
    },
    {"client", "aio", "embed"},
    {"engine"},
    {"integrations"},
    {"demo", "cli"},
]
PURE = set().union(*LAYERS[1:5]) - {"clock", "authority"}
"""The planner and what it stands on."""


def modules(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        found.setdefault(name, []).append(path)
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(module: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if module in layer)


def test_every_module_has_a_layer() -> None:
    assert set(modules(CLIENT)) - {"__init__"} == set().union(*LAYERS)


@pytest.mark.parametrize("module", sorted(set(modules(CLIENT)) - {"__init__", "v1"}))
def test_imports_point_downwards(module: str) -> None:
    for path in modules(CLIENT)[module]:
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kvferry" and len(parts) > 1 and parts[1] in modules(CLIENT):
                assert layer_of(parts[1]) <= layer_of(module), f"{path.name} imports {name}"
            assert parts[0] != "kvferry_server" or module == "embed", f"{path.name} imports {name}"


@pytest.mark.parametrize("module", sorted(PURE & set(modules(CLIENT))))
def test_pure_modules_know_neither_grpc_nor_nixl_nor_torch(module: str) -> None:
    for path in modules(CLIENT)[module]:
        assert not {name.split(".")[0] for name in imports(path)} & {"grpc", "nixl", "torch", "asyncio", "threading"}


def test_nixl_is_imported_in_one_file() -> None:
    """Also not by name: what a file hands to import_module counts."""
    loads = re.compile(r"""^\s*(import|from) nixl|import_module\([^)]*["']nixl""", re.MULTILINE)
    sources = [*CLIENT.rglob("*.py"), *SERVER.rglob("*.py")]
    assert [path.name for path in sources if loads.search(path.read_text())] == ["agents.py"]


def test_server_uses_only_the_contract_and_the_pure_parts() -> None:
    allowed = PURE | {"v1", "clock", "authority", "status", "channel"}
    for path in SERVER.rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kvferry" and len(parts) > 1:
                assert parts[1] in allowed, f"{path.name} imports {name}"


def test_domain_of_the_server_knows_neither_grpc_nor_asyncio() -> None:
    for name in ("lessor", "engines"):
        assert not {found.split(".")[0] for found in imports(SERVER / f"{name}.py")} & {"grpc", "asyncio", "nixl"}


def test_nobody_imports_grpc_tools() -> None:
    for folder in ("client", "server", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if "node_modules" not in path.parts:
                assert not any(name.startswith("grpc_tools") for name in imports(path)), path


@pytest.mark.parametrize(
    "statement", ["import kvferry", "import kvferry.client", "import kvferry.cli", "import kvferry.plan"]
)
def test_importing_the_sdk_needs_neither_torch_nor_nixl(statement: str) -> None:
    heavy = "('torch', 'nixl', 'nixl_cu12', 'nixl_cu13')"
    code = f"{statement}\nimport sys\nprint([name for name in sys.modules if name.split('.')[0] in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
