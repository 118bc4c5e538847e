"""Requests, and R14 checked by their tokens, which the model knows, and never by marks.

A request is all that KV depends on. Its KV up to a token differs from that of another request if one of these tokens
differs, or the adapter, or an image that begins before that token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from kvferry import Prompt, PromptInput
from kvferry._control.right_prompt import PromptCheck, ReaderPrompt
from kvferry.errors import PromptMismatch, TransferError
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.model.clocks import Violation
from tests.support.parties import BLOCK

if TYPE_CHECKING:
    from tests.model.source import Offered

IMAGE = 20, 4
"""First token and length of a request's image."""

Says = Literal["first", "next", "last", "never"]
"""The step with which a source first marks its prompt."""

Takes = Literal["own", "all", "a block"]
"""The published tokens that a reader takes: as many as its prompt has, all, or the first block."""

Verdict = Literal["matched", "unmarked", "mismatch"]


@dataclass(frozen=True)
class Request:
    """The inputs from which KV is computed.

    Attributes:
        tokens: those of the prompt, and those generated after it.
        length: of the prompt.
        adapter: the LoRA adapter.
        image: content of the image; empty: none.
        named: engines have a name for that content.
        stops: if the last block has the end of the prompt, the publication ends there.
    """

    tokens: tuple[int, ...] = field(repr=False)
    length: int
    adapter: str = ""
    image: str = ""
    named: bool = True
    stops: bool = False

    @property
    def known(self) -> int:
        """The number of tokens that engines can mark."""
        return self.length if self.named else min(self.length, IMAGE[0])

    def same(self, other: Request, end: int) -> bool:
        """Whether the KV of tokens [0, end) equals that of another request, by definition."""
        images = (self.image, other.image) if end > IMAGE[0] else ("", "")
        return self.adapter == other.adapter and self.tokens[:end] == other.tokens[:end] and images[0] == images[1]

    def prompt(self) -> Prompt:
        """Return the prompt, as both engines make it independently."""
        images = [PromptInput(*IMAGE, self.image if self.named else "")] if self.image else []
        return Prompt(self.tokens[: self.length], adapter=self.adapter, inputs=images)


def _changed(tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*tokens[:at], tokens[at] + 1, *tokens[at + 1 :])


TOKENS = tuple(range(100, 200))

WHOLE = Request(TOKENS, len(TOKENS))
"""For tests without marks: longer than anything published."""

PLAIN = Request(TOKENS, 40)

OTHER = replace(PLAIN, tokens=_changed(TOKENS, 0))

REQUESTS = (
    PLAIN,
    OTHER,
    replace(PLAIN, tokens=_changed(TOKENS, 14)),
    replace(PLAIN, tokens=_changed(TOKENS, 39)),
    # Only the beginning is the same, or the generated tokens differ.
    replace(PLAIN, tokens=TOKENS[:16] + TOKENS[:-16]),
    replace(PLAIN, tokens=_changed(TOKENS, 44)),
    replace(PLAIN, length=24, tokens=_changed(TOKENS, 26)),
    replace(PLAIN, length=24, stops=True),
    replace(PLAIN, length=12, stops=True),
    replace(PLAIN, adapter="sql"),
    replace(PLAIN, adapter="poems"),
    replace(PLAIN, image="a dog"),
    replace(PLAIN, image="a cat"),
    replace(PLAIN, image="a dog", named=False),
    replace(PLAIN, image="a cat", named=False),
    # The tokens of longer prompts are those that shorter ones generate.
    replace(PLAIN, length=24),
    replace(PLAIN, length=56),
)
"""Requests that are easily confused are neighbours; the last is a neighbour of the first."""


def verdict(stated: Collection[int], of: Request, reader: Request, until: int, *, complete: bool) -> Verdict:
    """Return the right verdict of a reader that takes tokens up to `until`, by the marked ends and the tokens."""
    compared = [end for end in stated if end <= reader.known]
    if not all(of.same(reader, end) for end in compared):
        return "mismatch"
    if any(until <= end for end in compared):
        return "matched"
    beyond = [end for end in stated if end > reader.length]
    # If all marks are beyond, and more may come, the source has marked the end of a longer prompt first.
    return "mismatch" if beyond and (complete or len(beyond) == len(stated)) else "unmarked"


@dataclass
class Said:
    """The marks of a publication, as its source states them.

    Attributes:
        says: the step with which the source first marks the prompt.
        generates: it marks generated tokens, too.
        stated: the ends marked so far, by definition.
        published: where the complete blocks end.
    """

    request: Request = WHOLE
    says: Says = "first"
    generates: bool = True
    stated: frozenset[int] = frozenset()
    published: int = 0
    _prompt: Prompt = Prompt.unknown
    _ends: frozenset[int] = frozenset()

    def step(self, step: pb.Publish) -> Prompt:
        """Return the prompt that the source states with a step."""
        own = self.request
        self.published = max((self.published, *(group.end_token for group in step.groups)))
        if self.says == "first" or (self.says == "next" and step.step) or (self.says == "last" and step.last):
            self._prompt = self._prompt or own.prompt()
            self._ends |= {own.known}
        if not self._prompt:
            return Prompt.unknown
        if self.generates and self.published > len(self._prompt):
            self._prompt = self._prompt.followed_by(own.tokens[len(self._prompt) : self.published])
            if own.known == own.length:
                self._ends |= {self.published}
        covered = step.last and self.published <= max(self._ends)
        self.stated |= self._ends | ({self.published} if covered else set())
        return self._prompt


@dataclass(frozen=True)
class Errand:
    """The task of a reader.

    Attributes:
        request: the request whose KV it wants.
        takes: the published tokens that it takes.
        late: it states its prompt only when its ranks begin.
        reference: in place of the publication's own reference; empty: that one.
        forged: the marks in the reference are not those of its maker.
        invented: no source or router has made the reference.
    """

    request: Request = WHOLE
    takes: Takes = "own"
    late: bool = False
    reference: str = ""
    forged: bool = False
    invented: bool = False


class OwnPrompt:
    """The prompt of one process of a reader, and its comparisons: the shipped ones, checked by the definition.

    Attributes:
        request: the request whose KV it wants.
        limit: the most tokens that it takes; None: all that are published.
    """

    def __init__(self, errand: Errand, check: PromptCheck) -> None:
        self.request = errand.request
        self.limit = {"own": self.request.length, "all": None, "a block": BLOCK}[errand.takes]
        self._check, self._forged = check, errand.forged or errand.invented
        self._own = ReaderPrompt(Prompt.unknown if errand.late else self.request.prompt(), check)
        self._marked: set[int] = set()

    def until(self, published: int) -> int:
        """Return the end of the tokens that it takes of those published."""
        return published if self.limit is None else min(published, self.limit)

    def taken(self, found: Offered) -> dict[int, tuple[int, ...]]:
        """Return the part of a publication's contents that it takes."""
        count = -(-self.until(found.said.published) // BLOCK)
        return dict(list(found.contents.items())[:count])

    def refuses(self, reference: pb.Reference, given: Offered | None) -> bool:
        """Whether it refuses the marks in the reference itself; `given`: the publication of the reference."""
        try:
            self._own.refuse(reference)
        except PromptMismatch as error:
            ends = [mark.end for mark in reference.marks]
            if given is not None:
                self._check_refused(error, ends, given, 0, complete=False)
            return True
        return False

    def told(
        self, marks: Mapping[int, bytes], reference: pb.Reference, found: Offered, published: int, *, complete: bool
    ) -> bool:
        """Whether it goes on after the marks that the home has sent so far."""
        try:
            self._own.told(marks, reference, found.publication.request_id, complete=complete)
        except TransferError as error:
            self._check_refused(error, marks, found, published, complete=complete)
            return False
        self._marked = set(marks)
        return True

    def judges(self, found: Offered, published: int, *, complete: bool) -> bool:
        """Whether its ranks begin, or go on."""
        if not self._own.prompt:
            self._own.prompt = self.request.prompt()
        try:
            self._own.judge(self.until(published), complete=complete)
        except TransferError as error:
            self._check_refused(error, self._marked, found, published, complete=complete)
            return False
        return True

    def check_moves(self, found: Offered, ends: Collection[int]) -> None:
        """R14: no bytes move that are marked as another prompt's. `ends`: of the marks that the home has sent."""
        if verdict(ends, found.said.request, self.request, 0, complete=False) == "mismatch":
            raise Violation(f"R14: bytes move of {found.said.request}, marked at {sorted(ends)}, for {self.request}")

    def check_good(self, found: Offered, origins: Collection[tuple[Request, int] | None]) -> None:
        """R14: bytes that count are of the reader's own prompt, as far as marks can show.

        Args:
            found: the publication that was read.
            origins: for each copied layer, the request that it was computed from, and its block index.
        """
        own, until, found_to_be = self.request, self.until(found.said.published), self._own.found
        wrong = any(
            origin is None or not origin[0].same(own, min(until, (origin[1] + 1) * BLOCK)) for origin in origins
        )
        what = (
            f"publication {found.number} of {found.said.request}, marked at {sorted(found.said.stated)}, up to {until}"
        )
        if wrong and (self._check is PromptCheck.REQUIRE or found_to_be == "matched"):
            raise Violation(f"R14: {own} counts {what}, as {found_to_be}")
        differs = next((end for end in range(1, until + 1) if not found.said.request.same(own, end)), None)
        if differs and any(end >= differs and not own.known < end <= own.length for end in found.said.stated):
            raise Violation(f"R14: {own} counts {what}, though its source has said that token {differs} is another")
        expected = verdict(found.said.stated, found.said.request, own, until, complete=True)
        if found_to_be != expected or (self._check is PromptCheck.REQUIRE and expected != "matched"):
            raise Violation(f"R14: {own} counts {what}, as {found_to_be}, which is {expected}")

    def _check_refused(
        self, error: TransferError, ends: Collection[int], found: Offered, published: int, *, complete: bool
    ) -> None:
        """No reader refuses bytes of its own prompt, unless the marks in the reference were forged."""
        if self._forged and isinstance(error, PromptMismatch):
            return
        expected = verdict(ends, found.said.request, self.request, self.until(published), complete=complete)
        by_name: Verdict = "mismatch" if isinstance(error, PromptMismatch) else "unmarked"
        required = self._check is PromptCheck.REQUIRE and complete
        if expected != by_name or (by_name == "unmarked" and not required):
            raise Violation(f"R14: {self.request} is refused {found.said.request}, which is {expected}: {error}")
