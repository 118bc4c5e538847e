"""The limits on calls, requests, answers and connections of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once on one address. Streams, and calls that wait, are counted apart, so that they do not
    keep renewals and reports out."""

    calls: int = 1024
    """Calls that are answered at once."""
    streams: int = 8192
    """Watch, ReadBlocks, which waits, and the streams of health and reflection."""


MAX_REQUESTS = 16
"""Requests of one host that are being read, or worked on if they are large. Those with geometries, and the others, have
this many each. A request has at most 4 MiB."""

MAX_LOCAL_REQUESTS = 64
"""The same for all callers on the UNIX socket together: gRPC cannot tell them apart."""

LARGE_MESSAGE = 256 * 1024
"""Bytes from which a request or an answer counts as large."""

MAX_SMALL_REQUEST = 64 * 1024
"""Bytes of the request of a method that `requests.MAX_REQUEST_BYTES` does not name. That of a stream may be kept for as
long as the stream is open."""

MAX_STREAMED_REQUEST = 1024
"""Bytes of each request of a method that takes a stream of them: reflection, whose requests are names."""

DECODED_FACTOR = 12
"""How many times its size a request may take once it is decoded, apart from `DECODED_SPARE`. Geometries take about four
times their size, numbers of one byte nine times theirs, and groups of one block with the shortest names eleven."""

DECODED_SPARE = 256 * 1024
"""Bytes that a decoded request may take in any case: a thousand notifications without content, say."""

MAX_DECODED_QUERIES = 16 << 20
"""Bytes that a request for checksums may take once it is decoded: 524,288 places of one block each, in two lists, and
the longest names of 4,096 planes take 13 MiB."""

MAX_FIELDS = 1 << 18
"""Fields of a request that are looked at to find what it takes, but for those of messages without lists: a quarter of a
second of work. The largest geometries have 180,000, in regions of twenty bytes."""

COUNTED_REQUEST = 16 * 1024
"""Bytes of a decoded request from which it is counted."""

HEAVY_REQUEST = 1 << 20
"""Bytes of a decoded request from which it waits for its host's turn, and for the worker thread to decode it."""

MAX_REQUEST_MEMORY = 128 << 20
"""Bytes of the decoded requests that one listener works on. Hosts share them."""

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

MAX_HOME_MEMORY = 1 << 30
"""Bytes of a home's budget that no setting gives. Far above what working engines need."""

MIN_HOME_MEMORY = 16 << 20
"""Bytes of a home's budget at least."""

WORKING_MEMORY = 384 << 20
"""Bytes that the process takes at most besides its home's budget: 100 MiB for the program and what it opens, and the
requests and answers that it works on."""
