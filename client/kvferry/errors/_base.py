"""The base of all errors of kvferry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

Rebuilt = TypeVar("Rebuilt", bound="KvferryError")


class KvferryError(Exception):
    """Base of all errors of kvferry.

    Next step: look in the log of the node server that the message names. Only errors that no other class fits are
    of this one, such as those of a peer of a later version.

    Attributes:
        reason: name of the `kvferry.v1.ErrorReason` without its prefix, e.g. ``"BAD_BLOCK"``; empty for errors that
            never cross the wire.
        code: name of the gRPC status code that carries it.
        values: every dynamic value of the message, as strings.
        retry_after: seconds after which repeating the same call makes sense; None if it does not, or at once is fine.
    """

    reason: str = ""
    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, retry_after: float | None = None, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.values: dict[str, str] = {key: str(value) for key, value in values.items()}

    @property
    def retryable(self) -> bool:
        """Whether repeating the same call can help (PROTOCOL, Errors)."""
        return self.code == "UNAVAILABLE" or self.retry_after is not None

    @classmethod
    def rebuilt(
        cls: type[Rebuilt], message: str, values: Mapping[str, str], retry_after: float | None = None
    ) -> Rebuilt:
        """Rebuild an error of this class that another process raised, with every attribute that the class has.

        Errors are never rebuilt by calling the class, because the constructors of many classes compose the message.
        """
        error = cls.__new__(cls)
        KvferryError.__init__(error, message, retry_after=retry_after)
        error.values = dict(values)
        error._set_attributes()
        return error

    def _set_attributes(self) -> None:
        """Set the further attributes of this class from the message and the values."""

    def __reduce__(self) -> tuple[object, ...]:
        # The state is applied last, so attributes that do not follow from the values are kept.
        return (_unpickled, (type(self), self.message, self.values, self.retry_after), self.__dict__)


def _unpickled(
    cls: type[KvferryError], message: str, values: Mapping[str, str], retry_after: float | None
) -> KvferryError:
    return cls.rebuilt(message, values, retry_after)
