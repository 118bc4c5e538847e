"""The limits on calls, requests, answers and connections of the process, and its fixed durations. Sizes are in bytes,
durations in seconds. `NodeConfig` has those that a deployment may set."""

from __future__ import annotations

MAX_REQUESTS = 16
"""Requests of one host that are being read; as many again for those with geometries."""

MAX_LOCAL_REQUESTS = 64  # `MAX_REQUESTS` of all callers on the UNIX socket together: gRPC cannot tell them apart
LARGE_MESSAGE = 256 * 1024  # From this size a request or an answer counts as large
COUNTED_REQUEST = 16 * 1024  # From this size a decoded request is counted against the budget
HEAVY_REQUEST = 1 << 20  # From this size a decoded request waits for its host's turn, and the worker decodes it

MAX_SMALL_REQUEST = 64 * 1024  # Of a method that `requests.MAX_REQUEST_BYTES` does not name. A stream may keep it
MAX_STREAMED_REQUEST = 1024  # Each request of a stream of them: reflection, whose requests are names

DECODED_FACTOR = 12
"""Bytes of memory that a decoded request may take per byte on the wire, apart from `DECODED_SPARE`. Geometries take
about 4, numbers of one byte 9, and groups of one block with the shortest names 11."""

DECODED_SPARE = 256 * 1024  # What a decoded request may take in any case: a thousand notifications without content, say

MAX_FIELDS = 1 << 18
"""Fields that the walk over a request looks at to find its decoded size, not counting those of messages without lists:
a quarter of a second of work. The largest geometries have 180,000, in regions of twenty bytes."""

MAX_REQUEST_MEMORY = 128 << 20  # Of the decoded requests that one listener works on. Hosts share it
MAX_PENDING_ANSWERS = 64 << 20  # Of large answers that wait until their clients take them. Hosts share it

RESERVED_FILES = 384
"""File descriptors that connections may not take: for gRPC itself, files, 256 relayed calls, and the admin's 64."""

MIN_CONNECTIONS = 8  # Connections that each listener gets at least
FULL_CONNECTIONS = 0.75  # Fraction of connections in use above which the host with the most loses its newest ones
MAX_HOME_MEMORY = 1 << 30  # Most of a home's budget if the setting `memory` is 0. Far above what working engines need
MIN_HOME_MEMORY = 16 << 20  # Least of a home's budget

WORKING_MEMORY = 384 << 20
"""Most that the process takes besides its home's budget: 100 MiB for the program; the requests and answers in work."""

REQUEST_TIMEOUT = 10.0  # How long a request may take to arrive; looked at every `SLOW_PEER_TIMEOUT`
RETRY_AFTER = 0.25  # Retry delay of a call that a limit refused

SLOW_PEER_TIMEOUT = 0.25  # How long a call may wait for its peer while other calls of its host wait to be read
SLOW_PEERS_TIMEOUT = 2.0  # How long as many slow calls as wait to be read may keep the last one waiting, about
ANSWER_TIMEOUT = 10.0  # How long an answer, its page or a status may wait, before the client loses its connection
DRAIN_STREAMS = 0.5  # How long streams get to end after a drain has asked them to, before the server ends them
LEASE_POLL = 0.05  # Between two checks whether leases are still live, during a drain
STOP_MARGIN = 10.0  # How long a drained server may take to end all it has, before its service manager kills it
CONNECTION_POLL = 0.5  # Between two checks of the number of connections
SWITCH_INTERVAL = 0.0005  # How long a thread may keep the interpreter while another thread waits for it
CERTIFICATE_POLL = 2.0  # Between two looks at whether the TLS files have changed
LISTING_POLL = 0.25  # Between two looks at which engines the directory should list
TRIM_POLL = 5.0  # Between two looks at whether there is freed memory to give back to the system
WITHDRAW_PATIENCE = 3.0  # How long a stopping server waits to withdraw its listings. Otherwise their ttl ends them
