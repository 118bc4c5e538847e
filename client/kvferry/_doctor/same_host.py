"""Whether one process may read another's memory (CMA, process_vm_readv), as UCX does between processes of a host.

Where it may not, UCX takes TCP without a word. The two processes that try it are siblings, as two engines are: Yama
lets a process read its own children, which would prove nothing.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

_SLOW = (
    "Reads between engines of this host go over TCP, without a message: 4 to 14 times slower, and with CPU at the "
    "source."
)
WORKS = Kind("cma-works", Level.OK)
DENIED = Kind("cma-denied", Level.PROBLEM, _SLOW, "See what forbids it in the line above.")
MISSING = Kind(
    "cma-missing",
    Level.PROBLEM,
    "UCX does not notice, and chooses CMA all the same: reads between engines of this host fail.",
    "Run engines on a kernel or in a sandbox that has process_vm_readv, by a seccomp profile that allows it; or set "
    "UCX_TLS=^cma, and reads go over TCP.",
)
PID_WORKS = Kind("cma-pid-works", Level.OK)
PID_DENIED = Kind("cma-pid-denied", Level.PROBLEM, _SLOW, "See what forbids it in the line above.")
PID_ELSEWHERE = Kind(
    "cma-pid-other-namespace",
    Level.PROBLEM,
    f"UCX uses CMA only within one PID namespace. {_SLOW}",
    "Let the containers share one: Kubernetes: one pod with shareProcessNamespace: true, or hostPID: true; docker: "
    "--pid container:NAME or --pid host. Between containers that cannot, TCP remains, or RDMA.",
)
PID_GONE = Kind(
    "cma-pid-gone", Level.PROBLEM, "Nothing was tried.", "Give the number that the process has in this container."
)
PID_UNKNOWN = Kind(
    "cma-pid-unknown",
    Level.UNKNOWN,
    "Nothing was tried.",
    "Run the doctor as the user of the other engine, or as root.",
)
KINDS = (WORKS, DENIED, MISSING, PID_WORKS, PID_DENIED, PID_ELSEWHERE, PID_GONE, PID_UNKNOWN)

_SOURCE = """
import ctypes, os, sys
memory = ctypes.create_string_buffer(b"k" * 4096)
print(os.getpid(), ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, sys
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
memory = ctypes.create_string_buffer(16)
here, there = Iovec(ctypes.addressof(memory), 16), Iovec(address, 16)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read.restype = ctypes.c_ssize_t
read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
got = read(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
print(0 if got == 16 else ctypes.get_errno() or -1)
"""
_PTRACE = 19
"""The bit of CAP_SYS_PTRACE."""


def check(host: Host) -> list[Finding]:
    """Try it between two processes of this user, and with the process that was named."""
    findings = [_two_of_ours(host)]
    if host.pid is not None:
        findings.append(_named(host, host.pid))
    return findings


def _two_of_ours(host: Host) -> Finding:
    command = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen([*command, _SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        try:
            pid, address = (source.stdout.readline() if source.stdout else "").split()
            problem = _read(int(pid), int(address))
        finally:
            source.kill()
    if not problem:
        return WORKS.found(f"two processes of user {os.geteuid()} can read each other's memory")
    said = f"process_vm_readv between two processes of user {os.geteuid()}: {_name(problem)}; {_why(host, problem)}"
    if problem == errno.ENOSYS:
        return MISSING.found(said)
    return DENIED.found(said, _remedy(host))


def _read(pid: int, address: int) -> int:
    """Have a process read another's memory; the number of the error, 0 if there is none. The time is that of the whole
    check, which is ended with all that it started."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _READER, str(pid), str(address)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _named(host: Host, pid: int) -> Finding:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return PID_GONE.found(f"there is no process {pid} here")
    except PermissionError:
        pass
    other, mine = host.status(pid), host.status()
    user = other.get("Uid", "?").split()[0]
    who = f"process {pid} ({other.get('Name', '?')}, user {user})"
    # A process of a namespace further down has a number in each.
    theirs, ours = _namespace(host, pid), _namespace(host, "self")
    deeper = len(other.get("NSpid", "").split()) > len(mine.get("NSpid", "").split())
    if deeper or (theirs and theirs != ours):
        return PID_ELSEWHERE.found(f"{who} is in another PID namespace than this one")
    try:
        mapping = next(line for line in host.text(f"/proc/{pid}/maps").splitlines() if re.search(r" r[w-][x-]p ", line))
    except StopIteration:
        if user not in ("?", str(os.geteuid())) or _forbids(host):
            return _pid_denied(host, who, user, errno.EPERM)
        return PID_UNKNOWN.found(f"{who}: its memory's map cannot be read")
    problem = _read(pid, int(mapping.partition("-")[0], 16))
    if problem:
        return _pid_denied(host, who, user, problem)
    return PID_WORKS.found(f"user {os.geteuid()} can read the memory of {who}")


def _pid_denied(host: Host, who: str, user: str, problem: int) -> Finding:
    said = f"user {os.geteuid()} reads {who}: {_name(problem)}; {_why(host, problem, user)}"
    return PID_DENIED.found(said, _remedy(host, user))


def _namespace(host: Host, pid: int | str) -> str:
    try:
        return str(host.path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _forbids(host: Host) -> bool:
    """Whether Yama keeps processes from each other that are not parent and child."""
    return host.text("/proc/sys/kernel/yama/ptrace_scope") not in ("", "0")


def _may_trace(host: Host) -> bool:
    return bool(int(host.status().get("CapEff", "0"), 16) >> _PTRACE & 1)


def _name(problem: int) -> str:
    return (
        f"{errno.errorcode.get(problem, problem)} ({os.strerror(problem)})"
        if problem > 0
        else "fewer bytes than asked for"
    )


def _why(host: Host, problem: int, user: str = "") -> str:
    """What forbids it, as far as the system tells."""
    scope, status = host.text("/proc/sys/kernel/yama/ptrace_scope"), host.status()
    reasons = []
    if problem == errno.ENOSYS:
        reasons.append("this kernel, or a filter of system calls, has no process_vm_readv")
    if user not in ("", str(os.geteuid())):
        reasons.append("the two have different users")
    if not _may_trace(host):
        reasons.append("this process lacks CAP_SYS_PTRACE")
    if _forbids(host):
        reasons.append(f"kernel.yama.ptrace_scope is {scope}")
    if status.get("Seccomp") == "2":
        reasons.append("a seccomp filter is in force")
    return ", ".join(reasons) or "the system does not tell why"


def _remedy(host: Host, user: str = "") -> str:
    steps = []
    if user not in ("", str(os.geteuid())):
        steps.append("run both engines as one user")
    if _forbids(host):
        steps.append("set kernel.yama.ptrace_scope to 0 on the host (sysctl -w kernel.yama.ptrace_scope=0)")
    if host.status().get("Seccomp") == "2":
        steps.append("allow process_vm_readv and process_vm_writev in the container's seccomp profile")
    steps.append(
        "give both containers the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; Kubernetes: capabilities.add)"
    )
    return "One of: " + "; ".join(steps) + "."
