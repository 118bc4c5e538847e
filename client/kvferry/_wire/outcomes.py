"""How publications and questions end, numbered as in kvferry.v1, whose enums of these names explain the values."""

from __future__ import annotations

import enum


class ReleaseOutcome(enum.IntEnum):
    """How a publication ended; `kvferry.v1.ReleaseOutcome` explains the values."""

    READ = 1
    UNREAD = 2
    DECLINED = 3
    ABORTED = 4
    FINAL = 5


class MissReason(enum.IntEnum):
    """Why an engine has nothing to read; `kvferry.v1.MissReason` explains the values."""

    NOT_CACHED = 1
    BUSY = 2
    UNSUPPORTED = 3
    NO_ANSWER = 4
