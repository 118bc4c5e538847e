"""What `import kvferry` offers."""

import pkgutil
import subprocess
import sys

import pytest

import kvferry


def test_exports_are_the_listed_names() -> None:
    assert sorted(kvferry.__all__) == [
        "AsyncClient",
        "Blocks",
        "Cache",
        "Client",
        "Costs",
        "Directory",
        "EmbeddedServer",
        "EngineGeometry",
        "EngineSession",
        "EngineSpec",
        "EngineToken",
        "Group",
        "GroupKind",
        "Holding",
        "IntegrityOptions",
        "Interval",
        "KvferryError",
        "Listed",
        "Listing",
        "MemoryKind",
        "MemoryRegion",
        "MissReason",
        "NixlOptions",
        "PathRule",
        "Plane",
        "Prompt",
        "PromptInput",
        "Publication",
        "Question",
        "RankGeometry",
        "Read",
        "ReadPlan",
        "ReadProgress",
        "ReadResult",
        "ReadState",
        "ReadSummary",
        "Release",
        "ReleaseOutcome",
        "SchedulerPort",
        "ServerSettings",
        "StagingOptions",
        "TensorView",
        "TlsConfig",
        "TokenShard",
        "Verification",
        "WorkerPort",
        "__version__",
        "diff",
        "open_directory",
        "parse_address",
        "parse_reference",
        "plan_read",
        "router_reference",
        "serve",
        "shard",
    ]


def test_exported_names_all_exist_and_are_documented() -> None:
    for name in kvferry.__all__:
        value = getattr(kvferry, name)
        assert name == "__version__" or value.__doc__
        assert name in dir(kvferry)


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kvferry, "no_such_name")


PUBLIC = sorted(module.name for module in pkgutil.iter_modules(kvferry.__path__) if module.name[0] != "_")


@pytest.mark.parametrize("module", [name for name in PUBLIC if name != "v1"])
def test_public_modules_are_available_without_an_import_of_their_own(module: str) -> None:
    program = f"""
import sys
import kvferry
assert not {{"torch", "nixl", "grpc", "numpy"}} & set(sys.modules)
assert {module!r} in dir(kvferry)
assert kvferry.{module}.__name__ == "kvferry.{module}"
assert not {{"torch", "nixl"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_misspelt_name_is_an_error_with_suggestions() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clint'") as caught:
        kvferry.Clint  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Clint", kvferry)
