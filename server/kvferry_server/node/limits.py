"""The limits on calls, requests, answers and connections of the process. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once on one address. Streams, and calls that wait (ReadBlocks), are counted apart, so that
    they do not keep renewals and reports out."""

    calls: int = 1024
    streams: int = 8192


MAX_REQUESTS = 16
"""Requests of one host that are being read, or worked on if they are large; as many again for requests with geometries.
A request has at most 4 MiB."""

MAX_LOCAL_REQUESTS = 64  # `MAX_REQUESTS` of all callers on the UNIX socket together: gRPC cannot tell them apart
LARGE_MESSAGE = 256 * 1024  # From this size a request or an answer counts as large
COUNTED_REQUEST = 16 * 1024  # From this size a decoded request is counted against the budget
HEAVY_REQUEST = 1 << 20  # From this size a decoded request waits for its host's turn, and the worker decodes it

MAX_SMALL_REQUEST = 64 * 1024
"""A request of any method that `requests.MAX_REQUEST_BYTES` does not name. The request of a stream may be kept while
the stream is open."""

MAX_STREAMED_REQUEST = 1024  # Each request of a stream of them: reflection, whose requests are names

DECODED_FACTOR = 12
"""Bytes of memory that a decoded request may take per byte on the wire, apart from `DECODED_SPARE`. Geometries take
about 4, numbers of one byte 9, and groups of one block with the shortest names 11."""

DECODED_SPARE = 256 * 1024  # What a decoded request may take in any case: a thousand notifications without content, say

MAX_DECODED_QUERIES = 16 << 20
"""A decoded request for checksums: 524,288 places of one block each, in two lists, and the longest names of 4,096
planes take 13 MiB."""

MAX_FIELDS = 1 << 18
"""Fields that the walk over a request looks at to find its decoded size, not counting those of messages without lists:
a quarter of a second of work. The largest geometries have 180,000, in regions of twenty bytes."""

MAX_REQUEST_MEMORY = 128 << 20  # Of the decoded requests that one listener works on. Hosts share it
MAX_PENDING_ANSWERS = 64 << 20  # Of large answers that wait until their clients take them. Hosts share it

RESERVED_FILES = 384
"""File descriptors that connections from outside may not take: for gRPC itself, files, relays to 256 homes, and the 64
connections of the admin listener."""

MIN_CONNECTIONS = 8  # Connections that each listener gets at least
FULL_CONNECTIONS = 0.75  # Fraction of connections in use above which the host with the most loses its newest ones
PORT_TRIES = 20  # Free ports that are tried until one is free on every address of a host name
MAX_HOME_MEMORY = 1 << 30  # Most of a home's budget if the setting `memory` is 0. Far above what working engines need
MIN_HOME_MEMORY = 16 << 20  # Least of a home's budget

WORKING_MEMORY = 384 << 20
"""Most that the process takes besides its home's budget: 100 MiB for the program and its open files, and the requests
and answers in work."""
