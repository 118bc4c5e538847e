"""Tests engines without NIXL, sockets or a node server: a home and a transport in memory.

`Fabric` replaces gRPC's connections and NIXL. The planner, the leases, the ports and the home are those of production.
`docs/testing.md` is the guide.
"""

from kvferry.testing._fabric import Fabric as Fabric
from kvferry.testing._held import HeldReads as HeldReads
