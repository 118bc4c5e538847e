"""Processes in which kvferry is loaded already: a test that starts several ranks would import it in each of them.

They are forked by a process that has imported it, and has started nothing of gRPC's or NIXL's. Their environment is the
one in which the first of them was started: set variables in a process of another kind.
"""

from __future__ import annotations

import multiprocessing

LOADED = multiprocessing.get_context("forkserver")
LOADED.set_forkserver_preload(
    [
        "kvferry._client",
        "kvferry._session",
        "kvferry.engine",
        "kvferry_server.node.server",
        "tests.support.engines",
        "tests.transport.sources",
        "tests.engine.port_engines",
    ]
)
