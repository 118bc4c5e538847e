"""Prompts, and the marks that tie a publication's KV to its prompt (PROTOCOL, The right prompt)."""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry import _arguments as arguments
from kvferry.errors import InvalidField

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

MARK_BYTES = 16

MAX_MARKS = 64
"""Most marks of a publication; the contract's limit."""

_BEGIN = b"kvferry prompt 1\0"
_MARK = b"kvferry mark 1"
_WORD = 2**32


@dataclass(frozen=True, slots=True)
class PromptInput:
    """An input of a prompt that is not text, such as an image: its placeholder tokens do not show its content.

    Attributes:
        offset: its first token.
        length: its number of tokens.
        identifier: a hash of the content, or a name that source and destination both receive. Empty: the input has no
            identifier, and the prompt is known up to `offset` only. Do not use identifiers that each engine draws for
            itself.

    Raises:
        InvalidField: an argument has the wrong type, or is out of range.
    """

    offset: int
    length: int
    identifier: str = ""

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for name, value in (("offset", self.offset), ("length", self.length)):
            arguments.integer(name, value, 0, 2**63 - 1)


class Prompt:
    """The inputs of a request's KV: its tokens, the LoRA adapter, and inputs such as images.

    The source publishes with its own prompt, the destination reads with its own. KV of another prompt is then refused
    (`PromptMismatch`), whatever requests a router has confused. Making a prompt takes about 1 ms per 128,000 tokens, so
    make it when the request arrives. A prompt is immutable, and can be used in any thread.

    Args:
        token_ids: all tokens of the request from the first, as integers from 0 to 2**32 - 1.
        adapter: name of the LoRA adapter, the same at both engines; empty: none. Not a number that each engine chooses.
        inputs: the inputs that are not text. Inputs whose content is in the token ids may be left out.

    Attributes:
        unknown: the prompt of an engine that does not have the tokens, for example because it received embeddings.
            Publications of it have no marks, and reads of it compare none.
        adapter: see above.
        inputs: see above, in the order of the digest.
        ends: where a source marks the prompt, rising: at the end of its known part, and before that at the ends of the
            prompts that `followed_by` continued.

    Raises:
        InvalidField: an argument has the wrong type, or is out of range.
    """

    unknown: ClassVar[Prompt]

    def __init__(self, token_ids: TokenIds, *, adapter: str = "", inputs: Iterable[PromptInput] = ()) -> None:
        self._tokens = _words(token_ids)
        self.adapter = arguments.text("adapter", adapter)
        given = arguments.several("inputs", inputs, PromptInput, "PromptInputs")
        self.inputs = tuple(sorted(given, key=attrgetter("offset", "length", "identifier")))
        self.ends: tuple[int, ...] = (self.known,) if self.known else ()
        name = self.adapter.encode()
        begun = hashlib.sha256(_BEGIN + struct.pack("<I", len(name)) + name)
        self._states = {0: begun}
        """States of the digest after these numbers of tokens: a later end costs the tokens since the last before it."""
        self._digests: dict[int, bytes] = {}
        for end in self.ends:
            self.digest(end)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._tokens) // 4

    def __bool__(self) -> bool:
        """Whether the prompt is known."""
        return bool(self._tokens)

    def __repr__(self) -> str:
        return f"Prompt({len(self)} tokens)" if self else "Prompt.unknown"

    def __reduce__(self) -> tuple[object, ...]:
        # The states of a digest cannot be pickled.
        return partial(Prompt, adapter=self.adapter, inputs=self.inputs), (self.token_ids,), {"ends": self.ends}

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The token ids, ``uint32[n]``, read-only: no copy."""
        return np.frombuffer(self._tokens, "<u4")

    @property
    def known(self) -> int:
        """The number of tokens of the known part: all, or those before the first input without an identifier."""
        return min((len(self), *(each.offset for each in self.inputs if not each.identifier)))

    def followed_by(self, token_ids: TokenIds) -> Prompt:
        """Return this prompt with further tokens, for example those that the source has generated. Digests that this
        prompt has computed are used again. An unknown prompt stays unknown. Raises as the class."""
        more = _words(token_ids)
        if not self or not more:
            return self
        made = Prompt.__new__(Prompt)
        made._tokens = self._tokens + more
        made.adapter, made.inputs = self.adapter, self.inputs
        made.ends = (*self.ends, made.known) if made.known > self.known else self.ends
        made._states, made._digests = dict(self._states), dict(self._digests)
        return made

    def continues(self, other: Prompt) -> bool:
        """Whether this prompt begins with the known part of the other prompt."""
        return other.known <= self.known and (not other.known or self.digest(other.known) == other.digest(other.known))

    def digest(self, end: int) -> bytes:
        """Return the digest of the prompt up to this token, 32 bytes; see `kvferry.v1.PromptMark`. Raises
        `InvalidField` if the prompt is not known that far."""
        end = arguments.integer("end", end)
        if not 0 < end <= self.known:
            raise InvalidField("end", end, f"1 to {self.known}, as far as the prompt is known")
        found = self._digests.get(end)
        if found is None:
            # A list: other threads may add states meanwhile.
            hashed = max(known for known in list(self._states) if known <= end)
            state = self._states[hashed].copy()
            state.update(self._tokens[4 * hashed : 4 * end])
            self._states[end] = state.copy()
            for each in self.inputs:
                if each.offset < end:
                    name = each.identifier.encode()
                    state.update(struct.pack("<BQQI", 1, each.offset, each.length, len(name)) + name)
            found = self._digests[end] = state.digest()
        return found

    def mark(self, key: bytes, end: int) -> bytes:
        """Return the digest of the mark of the first `end` tokens, 16 bytes, under the key of the publication's own
        reference; raises `InvalidField` if the prompt is not known that far."""
        digest = self.digest(end)
        marked = _MARK + struct.pack("<Q", end) + digest
        return hmac.digest(arguments.payload("key", key), marked, hashlib.sha256)[:MARK_BYTES]


def check_within(prompt: object, tokens: tuple[int, int] | None) -> None:
    """Raise `InvalidField` unless an argument is a prompt, and the tokens to read are within the prompt."""
    known = arguments.instance("prompt", prompt, Prompt, "a Prompt")
    if known and tokens is not None and tokens[1] > len(known):
        raise InvalidField("tokens", tokens, f"at most the prompt's {len(known)} tokens")


def _words(token_ids: object) -> bytes:
    """Copy token ids to little-endian words of four bytes; raises `InvalidField`, which shows no token."""
    try:
        if hasattr(token_ids, "__array__"):
            words = np.asarray(token_ids)
            good = words.ndim == 1 and words.dtype.kind in "iu"
            if good and (not len(words) or (words.min() >= 0 and words.max() < _WORD)):
                return words.astype("<u4").tobytes()
        elif isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray, memoryview)):
            # An array converts a list in a third of the time that numpy takes.
            return np.frombuffer(array("I", token_ids), np.uint32).astype("<u4").tobytes()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Raised by numpy, torch and `array` for other values than a row of integers. Not chained, because the text may
        # contain tokens.
        pass
    raise InvalidField("token_ids", type(token_ids), f"one row of integers from 0 to {_WORD - 1}")


Prompt.unknown = Prompt(())
