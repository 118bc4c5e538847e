"""Requests, and what R14 says of them: by their tokens, which the model knows, and never by marks.

A request is all that KV depends on. Its KV up to a token is another's if one of these tokens differs, or the adapter,
or an image that begins before it.
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
"""With which step a source says what its request is."""

Takes = Literal["own", "all", "a block"]
"""What a reader takes of what is published: as much as its prompt has, all, or the first block."""

Verdict = Literal["matched", "unmarked", "mismatch"]


@dataclass(frozen=True)
class Request:
    """What KV is computed from.

    Attributes:
        tokens: those of its prompt, and those that are generated after it.
        length: of its prompt.
        adapter: the LoRA adapter.
        image: the content of its image; empty: it has none.
        named: engines have a name for that content.
        stops: where its last block has the end of its prompt, it is published up to there.
    """

    tokens: tuple[int, ...] = field(repr=False)
    length: int
    adapter: str = ""
    image: str = ""
    named: bool = True
    stops: bool = False

    @property
    def known(self) -> int:
        """How far engines know it."""
        return self.length if self.named else min(self.length, IMAGE[0])

    def same(self, other: Request, end: int) -> bool:
        """Whether the KV of these tokens is that of another request: the definition."""
        images = (self.image, other.image) if end > IMAGE[0] else ("", "")
        return self.adapter == other.adapter and self.tokens[:end] == other.tokens[:end] and images[0] == images[1]

    def prompt(self) -> Prompt:
        """As both engines make it, each for itself."""
        images = [PromptInput(*IMAGE, self.image if self.named else "")] if self.image else []
        return Prompt(self.tokens[: self.length], adapter=self.adapter, inputs=images)


def _changed(tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*tokens[:at], tokens[at] + 1, *tokens[at + 1 :])


TOKENS = tuple(range(100, 200))

WHOLE = Request(TOKENS, len(TOKENS))
"""For those who do not care: longer than anything that is published."""

PLAIN = Request(TOKENS, 40)

OTHER = replace(PLAIN, tokens=_changed(TOKENS, 0))

REQUESTS = (
    PLAIN,
    OTHER,
    replace(PLAIN, tokens=_changed(TOKENS, 14)),
    replace(PLAIN, tokens=_changed(TOKENS, 39)),
    # Only the beginning is the same, or what is generated differs.
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
    # Those that are longer have what others generate.
    replace(PLAIN, length=24),
    replace(PLAIN, length=56),
)
"""Those that are easily confused are beside each other; the last one is beside the first."""


def verdict(stated: Collection[int], of: Request, reader: Request, until: int, *, complete: bool) -> Verdict:
    """What a reader that takes tokens up to `until` has to find, from the ends that were marked and from the tokens."""
    compared = [end for end in stated if end <= reader.known]
    if not all(of.same(reader, end) for end in compared):
        return "mismatch"
    if any(until <= end for end in compared):
        return "matched"
    beyond = [end for end in stated if end > reader.length]
    # If all are, and more may come, the source has marked the end of a longer prompt first.
    return "mismatch" if beyond and (complete or len(beyond) == len(stated)) else "unmarked"


@dataclass
class Said:
    """What a source says of the request that a publication is of.

    Attributes:
        request: the request.
        says: with which step it says so.
        generates: it says what is generated, too.
        stated: the ends that it has marked so far, by the definition.
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
        """What it says with a step that has its blocks."""
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
    """What a reader is sent for.

    Attributes:
        request: whose KV it wants.
        takes: what it takes of what is published.
        late: it says its prompt only when its ranks begin.
        reference: the one that it is given, if that is not the one that it is told of.
        forged: the marks in it are not those of its maker.
        invented: nobody has made it.
    """

    request: Request = WHOLE
    takes: Takes = "own"
    late: bool = False
    reference: str = ""
    forged: bool = False
    invented: bool = False


class OwnPrompt:
    """What one process of a reader knows and compares: the shipped comparison, held to the definition.

    Attributes:
        request: whose KV it wants.
        limit: where it ends to take tokens at the latest; None: at the end of what is published.
    """

    def __init__(self, errand: Errand, check: PromptCheck) -> None:
        self.request = errand.request
        self.limit = {"own": self.request.length, "all": None, "a block": BLOCK}[errand.takes]
        self._check, self._forged = check, errand.forged or errand.invented
        self._own = ReaderPrompt(Prompt.unknown if errand.late else self.request.prompt(), check)
        self._marked: set[int] = set()

    def until(self, published: int) -> int:
        """Where it ends to take tokens, of those that are published."""
        return published if self.limit is None else min(published, self.limit)

    def taken(self, found: Offered) -> dict[int, tuple[int, ...]]:
        """What it takes of the contents of a publication."""
        count = -(-self.until(found.said.published) // BLOCK)
        return dict(list(found.contents.items())[:count])

    def refuses(self, reference: pb.Reference, given: Offered | None) -> bool:
        """Whether it refuses what the reference itself says; `given`: what that is a reference to."""
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
        """Whether it goes on after what the home has told so far."""
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
        """R14: nothing moves that was said to be of another prompt. `ends`: of the marks that the home has sent."""
        if verdict(ends, found.said.request, self.request, 0, complete=False) == "mismatch":
            raise Violation(f"R14: bytes move of {found.said.request}, marked at {sorted(ends)}, for {self.request}")

    def check_good(self, found: Offered, origins: Collection[tuple[Request, int] | None]) -> None:
        """R14: what counts is of the reader's own prompt, as far as anybody can know.

        Args:
            found: the publication that was read.
            origins: of what was copied, the request that it was computed from, and which of its blocks it is.
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
        """Nobody is refused what is of its own prompt, unless the marks in the reference were forged."""
        if self._forged and isinstance(error, PromptMismatch):
            return
        expected = verdict(ends, found.said.request, self.request, self.until(published), complete=complete)
        by_name: Verdict = "mismatch" if isinstance(error, PromptMismatch) else "unmarked"
        required = self._check is PromptCheck.REQUIRE and complete
        if expected != by_name or (by_name == "unmarked" and not required):
            raise Violation(f"R14: {self.request} is refused {found.said.request}, which is {expected}: {error}")
