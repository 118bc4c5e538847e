"""Marks a publication's steps with the prompt that it is computed from (PROTOCOL, The right prompt)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry._prompt import MAX_MARKS, Prompt
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


@dataclass(slots=True)
class Marker:
    """Marks the steps of a publication with its prompt. `key` is that of the publication's reference; `ends` are those
    that were marked."""

    key: bytes = field(repr=False)
    prompt: Prompt
    ends: set[int] = field(default_factory=set)
    _held: Prompt = field(init=False, repr=False)
    """The prompt of the steps that are held, which the next step's prompt has to continue."""
    _settled: Prompt = field(init=False, repr=False)
    """The same when the last step had been sent."""

    def __post_init__(self) -> None:
        self._held = self._settled = self.prompt

    def follow(self, prompt: Prompt) -> None:
        """Go on with a longer prompt; `Prompt.unknown`: with the same. Raises `InvalidField` if the prompt does not
        continue the one before."""
        if prompt and not prompt.continues(self._held):
            expected = f"one that begins with {self._held}, with which it was published"
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
        self._held = self.prompt

    def unmark(self, step: pb.Publish) -> None:
        """Forget a step that no home has accepted. The engine may publish blocks of other tokens instead."""
        self.ends -= {mark.end for mark in step.marks}
        self._held = self._settled

    def settle(self) -> None:
        """Record that no step is being sent: no step is taken back any more."""
        self._settled = self._held
