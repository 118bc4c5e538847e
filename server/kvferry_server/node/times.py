"""Fixed durations of the process, in seconds. `NodeConfig` has those that a deployment may set."""

from __future__ import annotations

REQUEST_TIMEOUT = 10.0  # How long a request may take to arrive
RETRY_AFTER = 0.25  # Retry delay of a call that a limit refused

SLOW_PEER_TIMEOUT = 0.25
"""How long a call may wait for its peer, to send or to take, while other calls of its host wait to be read."""

ANSWER_TIMEOUT = 10.0
"""How long an answer, a page of one, or a status may wait for the client to take it, before the client loses its
connection."""

DRAIN_STREAMS = 0.5  # How long streams get to end after a drain has asked them to, before the server ends them
LEASE_POLL = 0.05  # Between two checks whether leases are still live, during a drain

STOP_MARGIN = 10.0
"""How long a drained server may take to end its connections, home and threads, before its service manager kills it."""

RESTART_PAUSE = 0.1
"""Least time between two starts of a gRPC server on one address: a client that can end one can end the next at once."""

RESTART_LOG_PAUSE = 10.0  # Least time between two log lines about gRPC servers that ended
CONNECTION_POLL = 0.5  # Between two checks of the number of connections
SWITCH_INTERVAL = 0.0005  # How long a thread may keep the interpreter while another thread waits for it
CERTIFICATE_POLL = 2.0  # Between two looks at whether the TLS files have changed
LISTING_POLL = 0.25  # Between two looks at which engines the directory should list
TRIM_POLL = 5.0  # Between two looks at whether there is freed memory to give back to the system

WITHDRAW_PATIENCE = 3.0
"""How long a stopping server waits for its listings to be withdrawn. Otherwise they end with their ttl."""
