"""Errors of other processes, rebuilt from what they sent."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kvferry.errors._base import KvferryError
from kvferry.errors._peers import InternalError
from kvferry.errors._transfers import TransferError


def _subclasses(cls: type[KvferryError]) -> list[type[KvferryError]]:
    return [found for sub in cls.__subclasses__() for found in [sub, *_subclasses(sub)]]


@functools.cache
def _by_reason() -> dict[str, type[KvferryError]]:
    return {cls.reason: cls for cls in _subclasses(KvferryError) if vars(cls).get("reason")}


def from_name(
    name: str,
    message: str,
    values: Mapping[str, str],
    *,
    retry_after: float | None = None,
    quiet: bool = False,
) -> KvferryError:
    """Rebuild an error that another process of the same engine raised, from the name of its class.

    Args:
        name: the name of the class; an unknown name gives an `InternalError`.
        message, values, retry_after: the attributes of the error.
        quiet: the same, of a `TransferError`.
    """
    known: list[type[KvferryError]] = [KvferryError, *_subclasses(KvferryError)]
    error = next((cls for cls in known if cls.__name__ == name), InternalError).rebuilt(message, values, retry_after)
    if isinstance(error, TransferError):
        error.quiet = quiet
    return error


def from_reason(
    reason: str, message: str, values: Mapping[str, str], retry_after: float | None = None
) -> KvferryError | None:
    """Rebuild an error that a peer raised, from its reason and metadata; None for a reason that is not kvferry's.

    Args:
        reason: name of the ErrorReason without its prefix.
        message: the status message.
        values: the metadata of the ErrorInfo.
        retry_after: seconds, from RetryInfo.
    """
    cls = _by_reason().get(reason)
    return None if cls is None else cls.rebuilt(message, values, retry_after)
