"""The durations that the process keeps to, in seconds. Those that a deployment may set are in `NodeConfig`."""

from __future__ import annotations

REQUEST_TIMEOUT = 10.0
"""How long a request may take to arrive."""

SLOW_PEER_TIMEOUT = 0.25
"""How long a call may wait for its peer, to send or to take, while other calls of its host wait to be read."""

ANSWER_TIMEOUT = 10.0
"""How long an answer, a page of one, or a status may wait for the client to take it, before the client loses its
connection."""

RETRY_AFTER = 0.25
"""After which a client repeats a call that was refused by a limit."""

DRAIN_STREAMS = 0.5
"""How long streams get to end by themselves when a drain has told them to, before they are ended."""

STOP_MARGIN = 10.0
"""How long a drained server may take to end its connections, home and threads, before its service manager kills it."""

LEASE_POLL = 0.05
"""Between two checks whether leases are still live, during a drain."""

RESTART_PAUSE = 0.1
"""At least between two starts of a gRPC server on one address: whoever can end one can end the next at once."""

RESTART_LOG_PAUSE = 10.0
"""At least between two log lines about gRPC servers that ended."""

CONNECTION_POLL = 0.5
"""Between two checks of the number of connections."""

SWITCH_INTERVAL = 0.0005
"""How long a thread may keep the interpreter while another one waits for it."""

CERTIFICATE_POLL = 2.0
"""Between two looks at whether the TLS files have changed."""

LISTING_POLL = 0.25
"""Between two looks at which engines the directory should list."""

WITHDRAW_PATIENCE = 3.0
"""How long a server that stops waits until it is listed no more. Otherwise its listings end with their ttl."""

TRIM_POLL = 5.0
"""Between two looks at whether memory was freed that can be given back."""
