"""Fixed durations of servicers, in seconds. Those that a deployment may set are in `kvferry_server.domain.times`."""

from __future__ import annotations

ANSWER_FRACTION = 0.05
ANSWER_MOST = 0.1
"""How long before its deadline a ReadBlocks stops waiting, so that its answer arrives in time: `ANSWER_FRACTION` of the
time that remained at its start, at most `ANSWER_MOST` seconds."""

PLAN_SECONDS = 5
"""Longest planning of one PlanRead. Some engines take minutes; ranks that are left out are named."""

WORKER_RETRY_AFTER = 0.25  # Retry delay when too many calls wait for the worker thread

REGISTER_TIMEOUT = 5.0
"""Timeout of a relayed registration. The rank repeats it, so there is no need to wait for a dead home."""

OPEN_TIMEOUT = 5.0
"""Timeout of the opening of a relayed Watch. The rank repeats it; a silent home must not keep a connection."""

RANK_LEFT_TIMEOUT = 1.0
"""Timeout of the notice that a relayed rank has left. A home that misses the notice assumes that this node is lost."""

DECLINE_TIMEOUT = 5.0  # Timeout of declines that are sent on to their home
RELAY_RETRY_AFTER = 1.0  # Retry delay when the relays are connected to too many homes
