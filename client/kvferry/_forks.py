"""Guards objects that cannot be used after a fork, because they own connections, threads or NIXL agents.

In a child process their methods raise `ForkedClient`. Closing methods do nothing there, since they would close the
connections of the parent, and are refused on the thread of a client's loop before they have closed a part.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from kvferry._loop import check_may_wait
from kvferry.errors import ForkedClient

Made = TypeVar("Made", bound="OneProcess")


class OneProcess:
    """Base class of public objects that can be used only in the process that made them.

    In a child of that process, public methods and properties of a subclass raise `ForkedClient`. `close` does nothing
    instead, and so does leaving a ``with`` block, which calls `close`. Attributes of instances stay readable.
    """

    _made_in: int

    def __new__(cls: type[Made], *_: Any, **__: Any) -> Made:
        made = object.__new__(cls)
        made._made_in = os.getpid()
        return made

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, member in tuple(vars(cls).items()):
            if name.startswith("_") and name not in ("__enter__", "__aenter__", "__await__"):
                continue
            if isinstance(member, property) and member.fget is not None:
                setattr(cls, name, property(_guarded(member.fget, ends=False), doc=member.__doc__))
            elif inspect.isfunction(member):
                setattr(cls, name, _guarded(member, ends=name == "close"))


def _guarded(method: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
    """Wrap a method: in a child process it raises `ForkedClient`, or does nothing if `ends` is set."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def guarded_later(self: OneProcess, *args: Any, **options: Any) -> Any:
            return None if _forked(self, ends) else await method(self, *args, **options)

        return guarded_later

    @functools.wraps(method)
    def guarded(self: OneProcess, *args: Any, **options: Any) -> Any:
        return None if _forked(self, ends) else method(self, *args, **options)

    return guarded


def _forked(made: OneProcess, ends: bool) -> bool:
    """Return whether this is a child of the object's process; raises `ForkedClient` there unless `ends` is set, which
    raises as `check_may_wait` elsewhere: closing waits."""
    here = os.getpid()
    if here == made._made_in:
        if ends:
            check_may_wait()
        return False
    if ends:
        return True
    name = type(made).__name__
    raise ForkedClient(
        f"this {name} was made in process {made._made_in}; process {here} must make its own",
        made_in=made._made_in,
        used_in=here,
    )


class Closing(OneProcess):
    """Base class of public objects that end with `close`. As a context manager, the object is closed at the end."""

    def close(self) -> None:
        """End the object; see the subclass."""
        raise NotImplementedError

    def __enter__(self: Made) -> Made:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
