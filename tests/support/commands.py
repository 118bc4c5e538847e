"""The loop of a process that does what a test tells it over a pipe."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def obey(pipe: Connection, do: Callable[..., Any]) -> None:
    """For each ``(command, arguments, options)`` that comes, send what ``do(command, *arguments, **options)`` returns,
    or the exception that it raises, until the test closes its end."""
    while True:
        try:
            command, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = do(command, *arguments, **options)
        except Exception as error:
            answer = error
        pipe.send(answer)
