"""Errors about when and where a call is made. They arise in this process and never cross the wire."""

from __future__ import annotations

from kvferry.errors._base import KvferryError


class WrongState(KvferryError):
    """The call comes at the wrong time: the arguments are valid, but something else has to be done first, or has
    already been done. The message says what to do. Values: whatever the call was about, such as engine_id, rank."""

    code = "FAILED_PRECONDITION"


class WrongThread(KvferryError):
    """A thread used a reading agent of another thread, which would crash. Values: agent, call."""


class ForkedClient(KvferryError):
    """A client was used in a child of the process that made it. Neither gRPC nor NIXL survives a fork: make a client
    in the child."""


class Closed(KvferryError):
    """The client, cache or session is closed."""
