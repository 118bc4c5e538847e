"""What vLLM says of a prompt that ends in the middle of a character, which routers that move sessions have to know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

TEXT = "wörld 漢字!"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_prompt_that_ends_in_half_a_character_is_said_again(tokenizer: PreTrainedTokenizerFast) -> None:
    """So `examples/session_router.py` takes the text there from /detokenize, whose text ends with U+FFFD then."""
    tokens = tokenizer.encode(TEXT)
    for cut in range(1, len(tokens)):
        prompt, rest = tokens[:cut], tokens[cut:]
        request: Any = SimpleNamespace(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams())
        detokenizer = FastIncrementalDetokenizer(tokenizer, request)
        detokenizer.update(rest, False)
        told = tokenizer.decode(prompt)
        again = told.endswith("\ufffd")
        assert detokenizer.output_text == (TEXT if again else TEXT[len(told) :])
        assert TEXT.startswith(told.rstrip("\ufffd"))
