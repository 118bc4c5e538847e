"""The transports between two processes of one host that the tests and the measures ask UCX for."""

from __future__ import annotations

from collections.abc import Mapping


def transports_of(device: str) -> Mapping[str, Mapping[str, str]]:
    """The environment in which ranks with caches on a device take a transport, by name.

    A list of UCX's contains tcp in any case: it needs it for small messages, and to notice the death of a peer.
    """
    near, more = ("cma", "") if device == "cpu" else ("cuda_ipc", "cuda_copy,")
    return {
        "as UCX chooses": {},
        "same host": {"UCX_TLS": f"{more}{near},tcp"},
        "tcp": {"UCX_TLS": f"{more}tcp"},
    }
