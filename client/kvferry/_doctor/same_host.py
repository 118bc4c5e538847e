"""Whether one process may read another's memory (CMA, process_vm_readv), as UCX does between processes of a host.

Where that is forbidden, UCX silently takes TCP. The check uses two sibling processes, as two engines are: Yama lets a
process read its own children, which would prove nothing.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

from kvferry._doctor.check import Finding, Host, finding

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
_ALONE = ("-I", "-S", "-c")  # Options of a Python that imports nothing but the modules that its lines name
_CAP_SYS_PTRACE = 19


def check(host: Host) -> list[Finding]:
    return [_two_of_ours(host), *(() if host.pid is None else (_named(host, host.pid),))]


def _two_of_ours(host: Host) -> Finding:
    command = [sys.executable, *_ALONE, _SOURCE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        try:
            pid, address = (source.stdout.readline() if source.stdout else "").split()
            problem = _read(int(pid), int(address))
        finally:
            source.kill()
    who = f"two processes of user {os.geteuid()}"
    if not problem:
        return finding("cma-works", f"{who} can read each other's memory")
    said, step = _obstacles(host, problem)
    said = f"process_vm_readv between {who}: {said}"
    return finding("cma-missing", said) if problem == errno.ENOSYS else finding("cma-denied", said, step)


def _read(pid: int, address: int) -> int:
    """Have a process read another's memory; returns errno, or 0. The timeout is that of the whole check."""
    command = [sys.executable, *_ALONE, _READER, str(pid), str(address)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _named(host: Host, pid: int) -> Finding:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return finding("cma-pid-gone", f"there is no process {pid} here")
    except PermissionError:
        pass
    other = host.status(pid)
    user = other.get("Uid", "?").split()[0]
    who = f"process {pid} ({other.get('Name', '?')}, user {user})"
    # A process of an inner namespace has a number in each namespace.
    theirs, ours = _namespace(host, pid), _namespace(host, "self")
    deeper = len(other.get("NSpid", "").split()) > len(host.status().get("NSpid", "").split())
    if deeper or (theirs and theirs != ours):
        return finding("cma-pid-other-namespace", f"{who} is in another PID namespace than this one")
    readable = re.search(r"^([0-9a-f]+)-[0-9a-f]+ r[w-][x-]p ", host.text(f"/proc/{pid}/maps"), re.MULTILINE)
    if readable is not None:
        problem = _read(pid, int(readable[1], 16))
    elif user not in ("?", str(os.geteuid())) or _yama(host):
        problem = errno.EPERM
    else:
        return finding("cma-pid-unknown", f"{who}: its memory's map cannot be read")
    if not problem:
        return finding("cma-pid-works", f"user {os.geteuid()} can read the memory of {who}")
    said, step = _obstacles(host, problem, user)
    return finding("cma-pid-denied", f"user {os.geteuid()} reads {who}: {said}", step)


def _namespace(host: Host, pid: int | str) -> str:
    try:
        return str(host.path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _yama(host: Host) -> str:
    """Return Yama's setting if it keeps a process from reading others than its children, else an empty string."""
    scope = host.text("/proc/sys/kernel/yama/ptrace_scope")
    return "" if scope == "0" else scope


def _obstacles(host: Host, problem: int, user: str = "") -> tuple[str, str]:
    """Return what the error is and what forbids reading, as far as the system tells, and the remedy."""
    reasons, steps, scope = [], [], _yama(host)
    if problem == errno.ENOSYS:
        reasons.append("this kernel, or a filter of system calls, has no process_vm_readv")
    if user not in ("", str(os.geteuid())):
        reasons.append("the two have different users")
        steps.append("run both engines as one user")
    if not host.capable(_CAP_SYS_PTRACE):
        reasons.append("this process lacks CAP_SYS_PTRACE")
    if scope:
        reasons.append(f"kernel.yama.ptrace_scope is {scope}")
        steps.append("set kernel.yama.ptrace_scope to 0 on the host (sysctl -w kernel.yama.ptrace_scope=0)")
    if host.status().get("Seccomp") == "2":
        reasons.append("a seccomp filter is in force")
        steps.append("allow process_vm_readv and process_vm_writev in the container's seccomp profile")
    # With this capability docker's own profile allows the calls, too.
    steps.append("give both containers the capability SYS_PTRACE")
    name = f"{errno.errorcode.get(problem, problem)} ({os.strerror(problem)})" if problem > 0 else "too few bytes came"
    how = "docker run --cap-add SYS_PTRACE; Kubernetes: capabilities.add"
    return f"{name}; {', '.join(reasons) or 'the system does not tell why'}", f"One of: {'; '.join(steps)} ({how})."
