"""The facts about a machine: its device, driver and the versions of the libraries that move the bytes."""

from __future__ import annotations

import ctypes
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kvferry
from kvferry.errors import NixlMissing

NVIDIA = Path("/proc/driver/nvidia/version")


def facts(device: str) -> dict[str, str]:
    """The facts about this process's machine, by name. Loads NIXL."""
    on_device = torch.device(device).type == "cuda"
    found = {"device": device}
    if on_device:
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory >> 20:,} MiB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _driver()
    return {
        **found,
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda or "none"),
        **_nixl(),
        "kvferry": kvferry.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release(),
    }


def _driver() -> str:
    # Line 1: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  …".
    if not NVIDIA.exists():
        return "unknown"
    lines = NVIDIA.read_text().splitlines()
    words = lines[0].split() if lines else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _nixl() -> dict[str, str]:
    """NIXL's build and version, and UCX's."""
    from kvferry._transport import nixl_binding

    try:
        bindings = nixl_binding.load()
    except NixlMissing as error:
        return {"NIXL": f"cannot be loaded: {error}"}
    build = str(bindings.__name__).partition(".")[0]
    try:
        found = f"{version(build)} ({build})"
    except PackageNotFoundError:
        found = build
    return {"NIXL": found, "UCX": _ucx(Path(bindings.__file__).parents[1] / f"{build}.libs")}


def _ucx(libraries: Path) -> str:
    """The version of the UCX that came with NIXL."""
    for path in sorted(libraries.glob("libucp*")):
        get = ctypes.CDLL(str(path)).ucp_get_version_string
        get.restype = ctypes.c_char_p
        return str(get().decode())
    return "not beside NIXL"
