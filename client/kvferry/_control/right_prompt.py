"""Whether a publication is of the reader's prompt (R14; PROTOCOL, The right prompt)."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Mapping

from kvferry._arguments import described
from kvferry._prompt import Prompt
from kvferry.errors import InvalidField, PromptMismatch, PromptUnmarked, TransferError
from kvferry.v1 import kv_transfer_pb2 as pb

LONGER = "another prompt, of which this one may be a part"


class PromptCheck(enum.Enum):
    """What a reader does with the marks of a publication."""

    REQUIRE = "require"
    """It reads only what a mark says to be of its prompt."""
    COMPARE = "compare"
    """It refuses what a mark says to be of another prompt, and accepts what has no mark."""
    OFF = "off"
    """It compares nothing."""


def checked_prompts(text: object) -> PromptCheck:
    """Convert the argument `prompt_check` of a client; raises `InvalidField`."""
    for each in PromptCheck:
        if each.value == text:
            return each
    raise InvalidField("prompt_check", described(text), "'require', 'compare' or 'off'")


class ReaderPrompt:
    """The prompt of one read, which is compared with the marks of what it reads.

    Called by one thread at a time: by the read's acquisition until it has told of the lease, and then with the lock of
    the reads, or by the acquisition.

    Args:
        prompt: the prompt; `Prompt.unknown` until it is known.
        check: what to do with marks.
        request_id, engine_id: the reader's name for the request, and the reader, for errors.

    Attributes:
        prompt: see above; may be set once, before `judge`.
        found: "matched": a mark covers the tokens that are read; "unmarked": none does; "unknown": so far, nothing was
            compared.
    """

    def __init__(
        self,
        prompt: Prompt = Prompt.unknown,
        check: PromptCheck = PromptCheck.COMPARE,
        request_id: str = "",
        engine_id: str = "",
    ) -> None:
        self.prompt = prompt
        self.found = "unknown"
        self._check = check
        self._request_id, self._engine_id = request_id, engine_id
        self._marks: Mapping[int, bytes] = {}
        self._hinted: Mapping[int, bytes] = {}
        """The marks in the reference. They may refuse a read, and prove nothing: a router may have written them. With
        an older home there are no others."""
        self._source, self._source_request_id = pb.Reference(), ""

    def refuse(self, reference: pb.Reference) -> None:
        """Compare what the reference itself says.

        Raises:
            PromptMismatch: the reference is that of another prompt.
        """
        self._source, self._source_request_id = reference, reference.request_id
        self._hinted = {mark.end: mark.digest for mark in reference.marks}
        self._compare(self._hinted)

    def told(self, marks: Mapping[int, bytes], reference: pb.Reference, request_id: str, *, complete: bool) -> None:
        """Compare the marks that the home has told so far.

        Args:
            marks: all of them, by their ends.
            reference: the publication's own reference.
            request_id: the source's name for the request.
            complete: no more follow.

        Raises:
            PromptMismatch, PromptUnmarked: see `judge`.
        """
        self._source, self._source_request_id = reference, request_id
        self._compare(marks)
        self._marks = dict(marks)
        if complete and self.prompt:
            # Whatever part of it is read.
            self.judge(1, complete=True)

    def judge(self, until: int, *, complete: bool) -> None:
        """Judge whether the tokens that are read are of this prompt, as far as the marks that were told say.

        Args:
            until: end of the tokens that are read.
            complete: all marks were told.

        Raises:
            PromptMismatch: the publication is of another prompt.
            PromptUnmarked: no mark covers the tokens, and the client requires one.
        """
        if self._check is PromptCheck.OFF:
            return
        self._compare(self._hinted)
        self._compare(self._marks)
        if not complete:
            return
        self.found = "unmarked" if self.prompt else "unknown"
        if self._covers(self._marks, until):
            self.found = "matched"
        elif self._longer(self._marks) or (self._longer(self._hinted) and not self._covers(self._hinted, until)):
            # It goes on where this prompt has ended, and its source knows how: it is of another prompt.
            raise self._error(PromptMismatch, LONGER)
        elif self._check is PromptCheck.REQUIRE:
            raise self._error(PromptUnmarked, "a prompt that no mark names")

    def _covers(self, marks: Iterable[int], until: int) -> bool:
        return any(until <= end <= self.prompt.known for end in marks)

    def _longer(self, marks: Iterable[int]) -> bool:
        return bool(self.prompt) and any(end > len(self.prompt) for end in marks)

    def _compare(self, marks: Mapping[int, bytes]) -> None:
        if self._check is PromptCheck.OFF:
            return
        # In their order, so that the tokens are hashed once.
        for end in sorted(end for end in marks if end <= self.prompt.known):
            if not hmac.compare_digest(self.prompt.mark(self._source.key, end), marks[end]):
                self._marks = marks
                raise self._error(PromptMismatch, "another prompt")
        if self.prompt and min(marks, default=0) > len(self.prompt):
            # Sources mark the end of their prompt first: what comes later cannot make it this one.
            self._marks = marks
            raise self._error(PromptMismatch, LONGER)

    def _error(self, kind: type[TransferError], what: str) -> TransferError:
        source = f"request {self._source_request_id!r} of engine {self._source.engine_id!r}"
        marks = sorted(self._marks)
        marked = f"marked at {', '.join(map(str, marks[:3]))}" if marks else "not marked"
        length = f"{len(self.prompt)} tokens" if self.prompt else "tokens unknown"
        own = f"request {self._request_id!r}" if self._request_id else "a request"
        return kind(
            f"{own} ({length}) was given the KV cache of {what}: that of {source}, {marked}; "
            "the router, or whoever chose the reference, may have confused two requests",
            request_id=self._request_id,
            tokens=len(self.prompt),
            reader=self._engine_id,
            source_request_id=self._source_request_id,
            engine_id=self._source.engine_id,
            publication=self._source.publication,
            marked=" ".join(map(str, marks)),
        )
