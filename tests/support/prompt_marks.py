"""Prompt marks by their definition, and the test vectors of the contract: both from the comment of `PromptMark`."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import Prompt, PromptInput
from tests.support.repository import ROOT


@dataclass(frozen=True)
class Case:
    """What a mark is made of. The inputs are in any order."""

    tokens: Sequence[int]
    end: int
    adapter: str = ""
    inputs: tuple[PromptInput, ...] = ()

    def defined(self, key: bytes) -> bytes:
        """The digest of the mark, written from the definition and without `kvferry.Prompt`."""
        name = self.adapter.encode()
        body = b"kvferry prompt 1\0" + struct.pack("<I", len(name)) + name
        body += b"".join(struct.pack("<I", token) for token in self.tokens[: self.end])
        for offset, length, identifier in sorted((i.offset, i.length, i.identifier.encode()) for i in self.inputs):
            if offset < self.end:
                body += b"\x01" + struct.pack("<QQI", offset, length, len(identifier)) + identifier
        message = b"kvferry mark 1" + struct.pack("<Q", self.end) + hashlib.sha256(body).digest()
        return hmac.new(key, message, hashlib.sha256).digest()[:16]

    def prompt(self) -> Prompt:
        """The same as an engine says it."""
        return Prompt(self.tokens, adapter=self.adapter, inputs=self.inputs)


_VECTOR = re.compile(
    r"(?:tokens (?P<tokens>[\d ]+)|the same), end (?P<end>\d+)"
    r'(?:, adapter "(?P<adapter>[^"]*)")?'
    r'(?:, with an input of first token (?P<offset>\d+), (?P<length>\d+) tokens, "(?P<identifier>[^"]*)")?'
    r" +(?P<digest>[0-9a-f]{32})"
)


def vectors() -> tuple[bytes, list[tuple[Case, bytes]]]:
    """The key of the contract's test vectors, and each with the digest of its mark."""
    proto = (ROOT / "protos" / "kvferry" / "v1" / "kv_transfer.proto").read_text()
    comment = proto.partition("\nmessage PromptMark {")[0].rpartition("\n\n")[2]
    text = " ".join(line.removeprefix("//").strip() for line in comment.splitlines())
    key, _, rest = text.partition("Test vectors, with the key ")[2].partition(":")
    found: list[tuple[Case, bytes]] = []
    for match in _VECTOR.finditer(rest):
        end, digest = int(match["end"]), bytes.fromhex(match["digest"])
        if match["tokens"] is None:
            before = found[-1][0]
            case = Case(before.tokens, end, before.adapter, before.inputs)
        else:
            given = match["offset"] is not None
            inputs = (PromptInput(int(match["offset"]), int(match["length"]), match["identifier"]),) if given else ()
            case = Case([int(token) for token in match["tokens"].split()], end, match["adapter"] or "", inputs)
        found.append((case, digest))
    assert len(found) == len(re.findall(r"\b[0-9a-f]{32}\b", rest)) > 0, "a vector was not understood"
    return bytes.fromhex(key), found
