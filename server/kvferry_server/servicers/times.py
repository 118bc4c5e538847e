"""The durations that servicers keep to, in seconds. Those that a deployment may set are in
`kvferry_server.domain.times`."""

from __future__ import annotations

ANSWER_FRACTION = 0.05
ANSWER_MOST = 0.1
"""How long before its deadline a ReadBlocks stops to wait, so that its answer that nothing was published arrives in
time: `ANSWER_FRACTION` of the time that remained at its start, at most `ANSWER_MOST` seconds."""

PLAN_SECONDS = 5
"""How long one PlanRead plans. A tool may ask about engines that take minutes; ranks that are left out are named."""

WORKER_RETRY_AFTER = 0.25
"""After which a client repeats a call that found too many others waiting for the worker thread."""

REGISTER_TIMEOUT = 5.0
"""How long a home may take to answer a relayed registration. The rank repeats it, so a dead home need not be waited
for."""

OPEN_TIMEOUT = 5.0
"""How long a home may take to open a relayed Watch. The rank repeats it; a home that says nothing must not keep a
connection for itself."""

RANK_LEFT_TIMEOUT = 1.0
"""How long a home may take to answer that a relayed rank has left. A home that does not hear it assumes that this node
is lost."""

DECLINE_TIMEOUT = 5.0  # How long a home may take to answer declines that were sent on to it
RELAY_RETRY_AFTER = 1.0  # After which a client repeats a call that found the relays connected to too many homes
