"""The limits on calls, requests, answers and connections of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once on one address. Streams are counted apart, so that readers that wait do not keep
    renewals and reports out."""

    calls: int = 1024
    """Unary calls."""
    streams: int = 8192
    """ReadBlocks, Watch, and the streams of health and reflection."""


MAX_REQUESTS = 16
"""Requests of one host that are being read, or worked on if they are large. Those with geometries, and the others, have
this many each. A request has at most 4 MiB."""

MAX_LOCAL_REQUESTS = 64
"""The same for all callers on the UNIX socket together: gRPC cannot tell them apart."""

LARGE_MESSAGE = 256 * 1024
"""Bytes from which a request or an answer counts as large."""

MAX_STREAM_REQUEST = 64 * 1024
"""Bytes of the request of a stream, which may be kept for as long as the stream is open."""

MAX_PENDING_ANSWERS = 64 << 20
"""Bytes of large answers that wait until their clients take them. Hosts share them."""

RESERVED_FILES = 384
"""File descriptors kept for other uses than connections from outside: gRPC's own, files, relays to 256 homes, and the
64 connections of the admin listener."""

MIN_CONNECTIONS = 8
"""Connections that each listener gets at least."""

FULL_CONNECTIONS = 0.75
"""The fraction of the connections in use from which on the host with the most loses its newest."""

PORT_TRIES = 20
"""Free ports that are tried until one is free on every address of a host name."""
