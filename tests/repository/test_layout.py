"""The tests stand in folders like those of the code, and share nothing but what `tests/support` holds."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT, syntax

TESTS = ROOT / "tests"
SUITES = {
    "benchmarks",
    "deploy",
    "deployed",
    "e2e",
    "faults",
    "fuzz",
    "gpu",
    "model",
    "mutation",
    "package",
    "rdma",
    "repository",
    "soak",
}
"""Of the whole system, or of the repository: folders of no folder of the code."""
API = {"api"}
"""Of the client's modules that are in no folder: `_cache`, `_client`, `aio`, `errors` and others."""

MODULES = sorted(path for path in TESTS.rglob("*.py") if "node_modules" not in path.parts)


def folders(package: Path) -> set[str]:
    """A package's folders, as the tests call them."""
    return {path.parent.name.lstrip("_") for path in package.glob("*/__init__.py")}


def imported(path: Path) -> Iterator[str]:
    """Modules of the tests that a file imports; a name that is imported from one may be a module as well."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module and node.module.split(".")[0] == "tests":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_folders_of_the_code_all_have_a_folder_of_tests() -> None:
    client = folders(ROOT / "client" / "kvferry") - {"v1"}
    assert folders(TESTS) == client | API | SUITES | {"server", "support"}
    assert folders(TESTS / "server") == folders(ROOT / "server" / "kvferry_server")


def foreign(path: Path) -> list[str]:
    """What a module imports of tests, or of another folder than its own and `tests/support`."""
    folder = ".".join(path.parent.relative_to(ROOT).parts)
    return [
        module
        for module in imported(path)
        if ".test_" in module or not f"{module}.".startswith((f"{folder}.", "tests.support."))
    ]


def test_modules_import_no_tests_and_only_from_their_folder_and_from_support() -> None:
    wrong = {path.relative_to(ROOT).as_posix(): foreign(path) for path in MODULES}
    assert {path: modules for path, modules in wrong.items() if modules} == {}


def test_module_names_are_unique() -> None:
    names = Counter(path.name for path in MODULES)
    shared = {"__init__.py", "__main__.py", "conftest.py"}
    assert [found for found, count in names.items() if count > 1 and found not in shared] == []


def test_other_folders_import_only_support_from_tests() -> None:
    for folder in ("benchmarks", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert [module for module in imported(path) if not module.startswith("tests.support.")] == [], path
