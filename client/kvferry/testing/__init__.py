"""Tests engines without NIXL, sockets or a node server: a home and a transport in memory. Checks layouts of caches.

`Fabric` replaces gRPC's connections and NIXL. The planner, the leases, the ports and the home are those of production.
`check_layout` checks an engine's planes with the engine's own kernels. `docs/testing.md` is the guide.

Names are loaded on first use: an engine that checks its layout when it starts imports no node server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.testing._fabric import Fabric as Fabric
    from kvferry.testing._memory import HeldReads as HeldReads
    from kvferry.testing.layout import CheckedLayout as CheckedLayout
    from kvferry.testing.layout import check_layout as check_layout

_HOME_OF = {"CheckedLayout": "layout", "Fabric": "_fabric", "HeldReads": "_memory", "check_layout": "layout"}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
