"""Test doubles for the tests of engines: a home and a transport in memory, without NIXL, sockets or a node server.

`Fabric` replaces what lies outside of kvferry; planner, leases and ports are the real ones. `docs/testing.md` is the
guide.
"""

from kvferry.testing._fabric import Fabric as Fabric
from kvferry.testing._held import HeldReads as HeldReads
