"""Marks a publication's steps with the prompt that it is computed from, and compares marks with the reader's prompt
(R14; PROTOCOL, The right prompt)."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry._prompt import MAX_MARKS, Prompt
from kvferry.errors import InvalidField, PromptMismatch, PromptUnmarked, TransferError
from kvferry.v1 import kv_transfer_pb2 as pb

LONGER = "another prompt, of which this one may be a part"


@dataclass(slots=True)
class Marker:
    """Marks the steps of a publication with its prompt. `key` is that of the publication's reference; `ends` are those
    that were marked."""

    key: bytes = field(repr=False)
    prompt: Prompt
    ends: set[int] = field(default_factory=set)

    def follow(self, prompt: Prompt) -> None:
        """Go on with a longer prompt; `Prompt.unknown`: with the same. Raises `InvalidField` if the prompt does not
        continue the one before."""
        if prompt and not prompt.continues(self.prompt):
            expected = f"one that begins with {self.prompt}, with which it was published"
            raise InvalidField("prompt", str(prompt), expected)
        self.prompt = prompt or self.prompt

    def mark(self, step: pb.Publish, before: Sequence[pb.Publish] = ()) -> None:
        """Add to the next step the marks of the prompt's ends that were not marked, while there is room, and to the
        last step the mark of the end of all published blocks, which need the steps `before`."""
        # A prompt that is continued with each token has more ends than a publication may have marks: one mark is kept
        # for the end of all published blocks.
        ends = set(sorted(set(self.prompt.ends) - self.ends)[: MAX_MARKS - 1 - len(self.ends)])
        if step.last:
            groups = (group for each in (*before, step) for group in each.groups)
            published = max((max(group.end_token, group.state_token) for group in groups), default=0)
            if 0 < published <= self.prompt.known:
                ends.add(published)
        for end in sorted(ends - self.ends):
            step.marks.add(end=end, digest=self.prompt.mark(self.key, end))
        self.ends |= ends


class PromptCheck(enum.Enum):
    """A reader's check of the marks of a publication; see `Client`."""

    REQUIRE = "require"
    COMPARE = "compare"
    OFF = "off"


class ReaderPrompt:
    """The prompt of one read, which is compared with the marks of the publication.

    Called by one thread at a time: by the read's acquisition until the lease was granted, and then with the lock of the
    reads, or by the acquisition. `request_id`, the reader's name for the request, and `engine_id`, the reader, are for
    errors.

    Attributes:
        prompt: may be set once, before `judge`; `Prompt.unknown` until then.
        found: "matched": a mark covers the tokens that are read; "unmarked": no mark does; "unknown": so far, nothing
            was compared.
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
        """The marks in the reference. They may refuse a read, but prove nothing: a router may have written them. An
        older home sends no others."""
        self._source, self._source_request_id = pb.Reference(), ""

    def refuse(self, reference: pb.Reference) -> None:
        """Compare the marks in the reference; raises `PromptMismatch` for those of another prompt."""
        self._source, self._source_request_id = reference, reference.request_id
        self._hinted = {mark.end: mark.digest for mark in reference.marks}
        self._compare(self._hinted)

    def told(self, marks: Mapping[int, bytes], reference: pb.Reference, request_id: str, *, complete: bool) -> None:
        """Compare the marks that the home has sent so far, by their ends; `complete`: no more follow. `reference` is
        the publication's own, and `request_id` its source's name for the request. Raises as `judge`."""
        self._source, self._source_request_id = reference, request_id
        self._compare(marks)
        self._marks = dict(marks)
        if complete and self.prompt:
            # Whichever part of the publication is read.
            self.judge(1, complete=True)

    def judge(self, until: int, *, complete: bool) -> None:
        """Decide by the marks that were received whether the tokens up to `until`, which are read, are of this prompt;
        `complete`: all marks were received. Raises `PromptMismatch`, and `PromptUnmarked` if no mark covers the tokens,
        and the client requires a mark."""
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
            # The source's prompt goes on where this one has ended: the publication is of another prompt.
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
            # Sources mark the end of their prompt first: no later mark can be that of this prompt.
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
            "the router, or the sender of the reference, may have confused two requests",
            request_id=self._request_id,
            tokens=len(self.prompt),
            reader=self._engine_id,
            source_request_id=self._source_request_id,
            engine_id=self._source.engine_id,
            publication=self._source.publication,
            marked=" ".join(map(str, marks)),
        )
