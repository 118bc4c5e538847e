"""Prompts as messages, for questions. The token ids are copied as a whole: a prompt may have hundreds of thousands."""

from __future__ import annotations

import numpy as np

from kvferry._prompt import Prompt, PromptInput
from kvferry.v1 import kv_transfer_pb2 as pb

MAX_ASKED_TOKENS = 235_000
"""Most tokens of a question's prompt: with inputs and references, they fit into a notification of 1 MiB."""

MAX_INPUTS = 256
MAX_IDENTIFIER = 256
"""Most inputs of a question's prompt, and most bytes of the identifier of an input; the contract's limits."""

_TOKEN_IDS = bytes([pb.Prompt.TOKEN_IDS_FIELD_NUMBER << 3 | 2])
"""What comes before the length of the token ids in an encoded prompt."""


def asked_end(prompt: Prompt) -> int:
    """Return how many tokens of a prompt an engine can be asked for: those that are known, and fit into a question."""
    left_out = [
        each.offset
        for index, each in enumerate(prompt.inputs)
        if index >= MAX_INPUTS or len(each.identifier.encode()) > MAX_IDENTIFIER
    ]
    return min(prompt.known, MAX_ASKED_TOKENS, *left_out)


def prompt_to_proto(prompt: Prompt, end: int) -> pb.Prompt:
    """Encode the first `end` tokens of a prompt, and the inputs that begin before."""
    words = prompt.token_ids[:end].tobytes()
    message = pb.Prompt.FromString(_TOKEN_IDS + _varint(len(words)) + words)
    message.adapter = prompt.adapter
    for each in prompt.inputs:
        if each.offset < end:
            message.inputs.add(offset=each.offset, length=each.length, identifier=each.identifier)
    return message


def prompt_from_proto(message: pb.Prompt) -> Prompt:
    """Decode a prompt; raises `InvalidField`, see `Prompt`."""
    inputs = [PromptInput(each.offset, each.length, each.identifier) for each in message.inputs]
    words = pb.Prompt()
    words.CopyFrom(message)
    for name in ("adapter", "inputs"):
        words.ClearField(name)
    # Iterating over the field would take a hundred times as long.
    count = len(message.token_ids)
    begin = len(_TOKEN_IDS + _varint(4 * count))
    token_ids = np.frombuffer(words.SerializeToString()[begin : begin + 4 * count], "<u4")
    return Prompt(token_ids, adapter=message.adapter, inputs=inputs)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
