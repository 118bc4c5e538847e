"""What `make gpu-bundle` packs is all that the tests of GPUs import."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from scripts import gpu_bundle
from tests.support.repository import ROOT, syntax

pytestmark = pytest.mark.slow

PACKED = {path.relative_to(ROOT) for path in gpu_bundle.sources()}
CODE = sorted(path for path in PACKED if path.suffix == ".py")
OURS = {"kvferry", "kvferry_server", "tests"}
ADMIN = {"aiohttp", "prometheus_client"}
LEFT_OUT = {
    "tests/support/vllm_engine_program.py": {"vllm"},
    "tests/support/vllm_engines.py": {"transformers"},
    "client/kvferry/stats.py": ADMIN,
    "client/kvferry/_directory/opening.py": {"tomli"},
    "server/kvferry_server/admin/metrics.py": ADMIN,
    "server/kvferry_server/admin/service.py": ADMIN,
    "server/kvferry_server/node/logs.py": {"pythonjsonlogger"},
    "server/kvferry_server/node/tracing.py": {"opentelemetry"},
}
"""What is the machine's own, makes a test skip itself, is for directories or a command that no test of GPUs runs, or is
imported only by a node server with an admin listener, a log of JSON or traces, none of which these tests have."""


def modules(path: Path) -> Iterator[str]:
    """Modules that a file imports; a name that is imported from one may be a module as well."""
    for node in ast.walk(syntax(ROOT / path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> Path | None:
    """The file of a module of ours."""
    top = {"kvferry": "client", "kvferry_server": "server"}.get(module.split(".")[0], "")
    whole = Path(top, *module.split("."))
    found = (whole.with_suffix(".py"), whole / "__init__.py")
    return next((path for path in found if (ROOT / path).is_file()), None)


def needed() -> set[Path]:
    """Files that the tests of GPUs import, directly or not, and all of kvferry: it imports parts by name."""
    found = {path for path in CODE if path.parts[0] != "tests" or path.parts[1] == "gpu"}
    found.add(Path("tests/conftest.py"))
    pending = list(found)
    while pending:
        for module in modules(pending.pop()):
            path = file_of(module) if module.split(".")[0] in OURS else None
            if path is not None and path not in found:
                found.add(path)
                pending.append(path)
    return found


def test_imported_files_are_all_packed() -> None:
    assert needed() - PACKED == set()


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_imported_packages_are_all_packed(python: str) -> None:
    packed = set(gpu_bundle.wanted(python, ["cu13"], [])) | gpu_bundle.OF_THE_MACHINE
    names = packages_distributions()
    missing = set()
    for path in needed():
        # The connectors of engines are for machines that have these engines.
        if path.is_relative_to("client/kvferry/integrations"):
            continue
        for module in modules(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in OURS | LEFT_OUT.get(path.as_posix(), set()):
                continue
            distributions = {canonicalize_name(name) for name in names.get(top, [top])}
            if not distributions & packed:
                missing.add((path.as_posix(), top))
    assert missing == set()


def test_cuda_flavour_is_a_choice() -> None:
    one, both = (set(gpu_bundle.wanted("3.12", cuda, [])) for cuda in (["cu12"], ["cu12", "cu13"]))
    assert both - one == {"nixl-cu13"}
    assert set(gpu_bundle.wanted("3.12", ["cu12"], ["numpy"])) - one == {"numpy"}


def test_files_cut_from_a_wheel_are_cut_from_its_list(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu12-1-py3-none-any.whl"
    kept = ("nixl_cu12/_api.py", "nixl_cu12.libs/nixl/libplugin_UCX.so", "nixl_cu12.libs/ucx/libuct_cuda.so.0")
    cut = ("nixl_ep_cu12/x.so", "nixl_cu12.libs/nixl/libplugin_OBJ.so", "nixl_cu12.libs/libaws-c-s3-1.so")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, *cut):
            archive.writestr(name, name)
        archive.writestr("nixl_cu12-1.dist-info/RECORD", "".join(f"{name},,\n" for name in (*kept, *cut)))
    (tmp_path / "trimmed").mkdir()
    with zipfile.ZipFile(gpu_bundle.trimmed(wheel, tmp_path / "trimmed")) as archive:
        assert set(archive.namelist()) == {*kept, "nixl_cu12-1.dist-info/RECORD"}
        listed = archive.read("nixl_cu12-1.dist-info/RECORD").decode()
    assert listed == "".join(f"{name},,\n" for name in kept)


def test_an_archive_over_its_limit_is_refused_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "BUILD", tmp_path / "build")
    monkeypatch.setattr(gpu_bundle, "download", lambda wheels, python: [])
    output = tmp_path / "bundle.tar.gz"
    with pytest.raises(gpu_bundle.TooLarge):
        gpu_bundle.bundle(output, "3.12", ["cu12"], [], 1 << 10)
    assert not output.exists()
    gpu_bundle.bundle(output, "3.12", ["cu12"], [], 64 << 20)
    with tarfile.open(output) as archive:
        names = archive.getnames()
        run = archive.getmember(f"{gpu_bundle.FOLDER}/run.sh")
    assert run.mode == 0o755
    assert f"{gpu_bundle.FOLDER}/tests/gpu/__main__.py" in names
    assert not [name for name in names if re.search("__pycache__|node_modules|nodejs", name)]
