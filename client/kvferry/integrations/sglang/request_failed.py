"""The error that SGLang reports for a request whose transfer has failed."""

from __future__ import annotations

REPEATED = "the request's bootstrap_room is that of another request, which is under way"
"""Why a request fails whose room another one has."""


class RequestFailed(Exception):
    """Says why a request has failed; SGLang puts it into the request's answer.

    Attributes:
        failure_reason: why; begins with the name of kvferry's error, where there is one.
        is_from_another_rank: this rank knows no reason, so another one has failed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"kvferry: {reason or 'another rank has failed'}")
        self.failure_reason = reason or "another rank has failed"
        self.is_from_another_rank = not reason
