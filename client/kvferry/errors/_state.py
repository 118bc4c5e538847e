"""Errors about when and where a call is made. They arise in this process and never cross the wire."""

from __future__ import annotations

from kvferry.errors._base import KvferryError


class WrongState(KvferryError):
    """The call comes at the wrong time: the arguments are valid, but something else has to be done first, or has
    already been done. The message says what to do. Values: whatever the call was about, such as engine_id, rank.

    Next step: do first what the message says.
    """

    code = "FAILED_PRECONDITION"


class WrongThread(KvferryError):
    """A thread used a reading agent of another thread, which would crash. Values: agent, call.

    Next step: report it with its traceback: only kvferry's own threads make such calls.
    """


class ForkedClient(KvferryError):
    """A client was used in a child of the process that made it. Neither gRPC nor NIXL survives a fork: make a client
    in the child.

    Next step: make a client after the fork, in the child.
    """


class Closed(KvferryError):
    """The client, cache or session is closed.

    Next step: make a new client or session, or stop using the closed one; look for the `close` that came too early.
    """
