"""The limits of what clients of the admin listener can make the node server do. Durations are in seconds."""

from __future__ import annotations

MAX_CONNECTIONS = 64  # A further one ends the oldest, so that silent clients keep no others out
CONNECTION_SECONDS = 10.0  # From a connection's start until its answer is taken. Each has one request
MAX_LINE = 4096  # Bytes of a request line, and of a header
MAX_HEADERS = 64

METRICS_KEPT = 0.5
"""How long the same metrics are answered again: a client that scrapes without pause costs as much as a client that
scrapes twice a second."""

PAGE_SHARE = 0.1
"""Fraction of the event loop's time that pages and lists may take, however many are requested: after each comes a
pause, in which the next ones wait."""

PAGE_SIZE = 50  # Entries of a listing on one page
MAX_LABEL = 256  # Characters of a rank's labels on a page: each of its ranks may have megabytes
LAG_POLL = 0.5  # Between two measurements of how late the event loop runs its timers
OVERDUE = 5.0  # By which the home's timers may be late before the node server counts as ill
