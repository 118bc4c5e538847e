"""Checks in processes that really have the rights, limits, clocks and packages of the finding."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from kvferry._doctor import same_host, ucx
from kvferry._doctor.check import Host
from tests.doctor.looking import look_in, names, run
from tests.support.node_servers import environment

pytestmark = pytest.mark.slow

NIXL = pytest.mark.skipif(util.find_spec("nixl") is None, reason="NIXL is not installed")
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="takes the rights of root")
NOBODY = """
import dataclasses, json, os, sys
import kvferry._doctor.catalogue
from kvferry._doctor.check import table
# Other users may not enter the folders of this Python, but those of the system's Python.
table()
sys.executable = "/usr/bin/python3"
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
"""

SECCOMP = """
import ctypes, struct
# Refuse process_vm_readv, as a container's filter does: load its number, compare, refuse or allow.
import platform
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
program = b"".join(
    struct.pack("HBBI", *line)
    for line in ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, REFUSE), (0x06, 0, 0, 0x7FFF0000))
)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, program)), 0, 0) == 0, ctypes.get_errno()
"""
NO_HUGE_PAGES = "import ctypes; assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"


def can(*command: str) -> bool:
    """Whether this machine lets us run a command that changes a namespace or a user."""
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def other() -> Iterator[subprocess.Popen[str]]:
    """A process like an engine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_two_processes_of_one_user_can_read_each_other() -> None:
    assert set(look_in([], "cma")) == {"cma-works"}


@NIXL
def test_seccomp_filter_is_named_and_reads_then_go_over_tcp() -> None:
    refuse = SECCOMP.replace("REFUSE", "0x00050001")
    found = look_in([], "cma", first=refuse)
    assert set(found) == {"cma-denied"}
    for word in ("EPERM", "seccomp"):
        assert word in found["cma-denied"]["found"]
    for word in ("seccomp", "SYS_PTRACE"):
        assert word in found["cma-denied"]["do"]
    assert set(look_in([], "moves", first=refuse)) == {"reads-by-tcp"}


@NIXL
def test_system_without_process_vm_readv_is_named_and_reads_then_fail() -> None:
    lacking = SECCOMP.replace("REFUSE", "0x00050026")
    assert set(look_in([], "cma", first=lacking)) == {"cma-missing"}
    assert set(look_in([], "moves", first=lacking)) == {"nixl-unusable"}
    assert set(look_in([], "moves", first=lacking, UCX_TLS="^cma")) == {"reads-by-tcp"}


def test_process_that_may_be_read(other: subprocess.Popen[str]) -> None:
    assert "cma-pid-works" in names(run("cma", Host(pid=other.pid)))


def test_process_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert "cma-pid-gone" in names(run("cma", Host(pid=ended.pid)))


@ROOT_ONLY
def test_process_of_another_user(other: subprocess.Popen[str]) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no Python that user nobody can run")
    found = look_in([], "cma", str(other.pid), first=NOBODY)
    assert set(found) == {"cma-works", "cma-pid-denied"}
    assert "different users" in found["cma-pid-denied"]["found"]
    assert "one user" in found["cma-pid-denied"]["do"]


@ROOT_ONLY
def test_process_in_another_pid_namespace() -> None:
    if not can("unshare", "--pid", "--fork", "true"):
        pytest.skip("no PID namespaces here")
    # The process prints its number in this namespace, and waits.
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
        found = run("cma", Host(pid=inner))
        outer.communicate("")
    assert names(found) == {"cma-works", "cma-pid-other-namespace"}


def test_process_whose_memory_map_cannot_be_read(other: subprocess.Popen[str], tmp_path: Path) -> None:
    # Like a kernel that hides /proc/PID/maps: only the tree of files differs from the real one.
    (tmp_path / "proc").mkdir()
    assert names([same_host._named(Host(root=tmp_path), other.pid)]) == {"cma-pid-unknown"}


def test_yama_is_named_where_it_forbids(tmp_path: Path) -> None:
    """This machine's kernel has no Yama, so the error is real in the test above and the setting is shown here."""
    scope = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    scope.parent.mkdir(parents=True)
    scope.write_text("1\n")
    host = Host(root=tmp_path)
    said, step = same_host._obstacles(host, 1)
    assert "kernel.yama.ptrace_scope is 1" in said
    assert "CAP_SYS_PTRACE" in said
    assert "sysctl -w kernel.yama.ptrace_scope=0" in step


@pytest.mark.parametrize(("limit", "finding"), [(256, "open-files-few"), (8192, "open-files-enough")])
def test_open_files(limit: int, finding: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < limit:
        pytest.skip("the hard limit is lower")
    assert set(look_in(["prlimit", f"--nofile={limit}:{hard}"], "open-files")) == {finding}


def test_cores_of_a_larger_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert "cpus-enough" in names(run("cpus", Host()))


def test_single_core_is_found() -> None:
    core = min(os.sched_getaffinity(0))
    found = look_in(["taskset", "-c", str(core)], "cpus")
    assert set(found) == {"cpus-few"}
    assert "may run on 1 of" in found["cpus-few"]["found"]


def test_huge_pages_that_are_switched_off_for_the_process() -> None:
    if names(run("huge-pages", Host())) == {"huge-pages-off"}:
        pytest.skip("this kernel gives none")
    found = look_in([], "huge-pages", first=NO_HUGE_PAGES)
    assert set(found) == {"huge-pages-not-given"}


def test_huge_pages_of_this_machine() -> None:
    usual = names(run("huge-pages", Host()))
    assert usual & {"huge-pages-given", "huge-pages-on-request", "huge-pages-off", "huge-pages-not-given"}
    if usual == {"huge-pages-on-request"}:
        asked = replace(Host(), environ={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"})
        assert names(run("huge-pages", asked)) == {"huge-pages-given"}


def installed(folder: Path, package: str, version: str) -> None:
    """Make a folder in which Python finds this version of a package before the real one."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("package", "version", "finding"),
    [
        ("grpcio", "1.62.3", "package-out-of-range"),
        ("numpy", "1.24.0", "package-out-of-range"),
        ("protobuf", "8.0.0", "package-out-of-range"),
        ("grpcio", "1.84.0", ""),
    ],
)
def test_version_shows_packages(tmp_path: Path, package: str, version: str, finding: str) -> None:
    installed(tmp_path, package, version)
    found = look_in([], "packages", first=f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert set(found) - {"server-missing", "packages-fit"} == ({finding} if finding else set())
    if finding:
        assert f"{package} {version}" in found[finding]["found"]


def test_grpc_tools_beside_nixl(tmp_path: Path) -> None:
    (tmp_path / "grpc_tools").mkdir()
    installed(tmp_path, "grpcio-tools", "1.62.3")
    installed(tmp_path, "nixl", "1.5.1")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert "grpc-tools-beside-nixl" in look_in([], "packages", first=first)


def test_router_without_extras() -> None:
    """Without NIXL, torch and the server's packages the doctor runs, and names what is missing."""
    first = """
import re, sys
from importlib import metadata
real = metadata.version
def version(name):
    if re.match("nixl|torch|uvloop|grpcio-|pydantic", name):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
class Missing:
    def find_spec(self, name, path=None, target=None):
        if re.match("nixl|torch|uvloop|grpc_health|grpc_reflection|pydantic|kvferry_server", name):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""
    assert {"packages-fit", "nixl-missing", "server-missing"} == set(look_in([], "packages", first=first))
    assert set(look_in([], "moves", first=first)) == {"moves-not-tried"}


@pytest.mark.parametrize(
    ("way", "share", "finding"),
    [
        ("cma/memory", 0.1, "reads-slow"),
        ("cma/memory", 0.9, "reads-by-cma"),
        ("rc_mlx5/mlx5_0:1", 0.9, "reads-by-another-way"),
    ],
)
def test_reads_by_each_transport_are_found(
    monkeypatch: pytest.MonkeyPatch, way: str, share: float, finding: str
) -> None:
    """Transports and speeds that this machine does not have."""
    monkeypatch.setattr(ucx, "_measure", lambda: (share * 1e10, 1e10, 0))
    monkeypatch.setattr(ucx, "_way", lambda text: way)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert names(ucx.moves(Host())) == {finding}


@NIXL
@pytest.mark.parametrize(
    ("tls", "finding"),
    [("", "reads-by-cma"), ("tcp", "reads-by-tcp"), ("sm", "nixl-unusable"), ("nothing", "nixl-unusable")],
)
def test_read_between_two_processes(tls: str, finding: str) -> None:
    env = {name: value for name, value in environment().items() if not name.startswith("UCX_")}
    found = run("moves", Host(environ={**env, **({"UCX_TLS": tls} if tls else {})}))
    expected = {finding, "reads-slow"} if finding == "reads-by-cma" else {finding}
    assert names(found) <= expected
    if finding.startswith("reads"):
        assert "of a copy in one process" in found[0].found
    else:
        assert "UCX: " in found[0].found


@NIXL
def test_process_that_crashes_at_its_end_is_found() -> None:
    crash = """
from kvferry._doctor import ucx
real = ucx.python
ucx.python = lambda code: real(code + "; import os; os.kill(os.getpid(), 11)")
"""
    found = look_in([], "moves", first=crash)
    assert set(found) & {"reads-by-cma", "reads-slow"}
    assert found["nixl-ends-badly"]["found"] == "the process that was read from ended by SIGSEGV"
