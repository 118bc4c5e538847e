"""Which versions of packages are installed, and whether kvferry runs with them."""

from __future__ import annotations

import platform
import re
from importlib import metadata, util

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

RANGES: dict[str, tuple[str, str]] = {
    "grpcio": ("1.80", "2"),
    "protobuf": ("4.25.3", "8"),
    "numpy": ("1.26", ""),
    "nixl": ("1.5.1", "2"),
}
"""The first version that kvferry accepts, and the first that it does not, as pyproject.toml declares them."""

ONE_QUEUE_UNTIL = "1.84"
"""Before it, grpcio handles the calls of all methods one after another (docs/grpc.md)."""

SERVER = ("uvloop", "grpcio-health-checking", "grpcio-reflection", "pydantic-settings")

FIT = Kind("packages-fit", Level.OK)
OUT_OF_RANGE = Kind(
    "package-out-of-range",
    Level.PROBLEM,
    "kvferry was not made for this version; imports or calls may fail.",
    "Install a version in the range that is given.",
)
ONE_QUEUE = Kind(
    "grpcio-one-queue",
    Level.WARNING,
    "With it, the calls of all methods wait in one queue of a node server, and one busy caller makes gRPC drop the "
    "calls of others. Clients are not affected.",
    "Where kvferryd runs: pip install 'grpcio>=1.84'.",
)
NIXL_MISSING = Kind(
    "nixl-missing",
    Level.WARNING,
    "No engine can move bytes from this environment. Node servers, routers and the command line do not need NIXL.",
    "Where engines run: pip install 'kvferry[nixl]'.",
)
SERVER_MISSING = Kind(
    "server-missing",
    Level.OK,
    "kvferryd and kvferry.serve() do not start in this environment. Engines that use a node server elsewhere do not "
    "need them.",
    "Where kvferryd runs: pip install 'kvferry[server]'.",
)
GRPC_TOOLS = Kind(
    "grpc-tools-beside-nixl",
    Level.WARNING,
    "A process that imports both grpc_tools and NIXL crashes, in whichever order: each brings its own libprotobuf.",
    "Uninstall grpcio-tools here, or never import grpc_tools in an engine; generate code in another environment.",
)
KINDS = (FIT, OUT_OF_RANGE, ONE_QUEUE, NIXL_MISSING, SERVER_MISSING, GRPC_TOOLS)


def version_of(package: str) -> str:
    """Return the installed version of a package; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def parts(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, for comparisons: ``1.85.1`` as (1, 85, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check(host: Host) -> list[Finding]:
    """Compare the installed versions with those that kvferry accepts."""
    found = {package: version_of(package) for package in (*RANGES, "torch")}
    findings = []
    for package, (first, beyond) in RANGES.items():
        version = found[package]
        if version and (parts(version) < parts(first) or (beyond and parts(version) >= parts(beyond))):
            wanted = f">={first}{f',<{beyond}' if beyond else ''}"
            findings.append(
                OUT_OF_RANGE.found(f"{package} {version}; kvferry needs {wanted}", f"pip install '{package}{wanted}'")
            )
    grpcio = found["grpcio"]
    if parts(RANGES["grpcio"][0]) <= parts(grpcio) < parts(ONE_QUEUE_UNTIL):
        findings.append(ONE_QUEUE.found(f"grpcio {grpcio}"))
    if not found["nixl"]:
        findings.append(NIXL_MISSING.found("NIXL is not installed for this Python"))
    elif util.find_spec("grpc_tools") is not None:
        findings.append(GRPC_TOOLS.found(f"grpcio-tools {version_of('grpcio-tools')} beside nixl {found['nixl']}"))
    if missing := [package for package in SERVER if not version_of(package)]:
        findings.append(SERVER_MISSING.found(f"not installed: {', '.join(missing)}"))
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    where = f"Python {platform.python_version()}, kvferry {version_of('kvferry') or 'from its source'}, {installed}"
    return [FIT.found(where), *findings] if not findings or findings[0].kind is not OUT_OF_RANGE else findings
