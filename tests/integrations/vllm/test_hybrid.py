"""Models that keep other things than K and V of every token, in real vLLM engines: states, windows, latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_engines import PREFILL, Node, make_model, prompt, request
from tests.support.vllm_models import make_gated_delta_model, make_hybrid_model, make_latent_model
from tests.support.vllm_requests import alone, computed_as_another, said
from tests.support.vllm_versions import MINOR, convolves_float32

pytestmark = pytest.mark.timeout(900)
BLOCK = 128
"""vLLM's choice for the model: a block of attention is as large as a state."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid_model(tmp_path_factory.mktemp("model"))


LAST_STATE = {"enable_prefix_caching": False}
"""Without prefix caching vLLM keeps the last state only, otherwise states of whole blocks."""

LENGTHS = (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 300)


@pytest.mark.skipif(not convolves_float32(), reason="this vLLM takes Mamba on this CPU in bfloat16 only")
@pytest.mark.parametrize(
    ("prefill", "decode", "lengths"),
    [
        pytest.param(LAST_STATE, {}, LENGTHS, id="1-to-1"),
        pytest.param({"tp": 2, **LAST_STATE}, LAST_STATE, LENGTHS, id="2-to-1"),
        pytest.param(LAST_STATE, {"tp": 2}, LENGTHS, id="1-to-2"),
        # Prefill with prefix caching: vLLM 0.32.0 itself fails on CPU where a prompt is longer than a block (IndexError
        # in `MambaMixer2.conv_ssm_forward`: the CPU's kernel returns no states of blocks).
        pytest.param({}, LAST_STATE, (2, 50, 100), id="1-to-1-from-states-of-blocks"),
    ],
)
def test_decode_continues_the_state_of_prefill(
    pair: Callable[..., tuple[Node, Node]],
    model: Path,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    lengths: tuple[int, ...],
) -> None:
    common: dict[str, Any] = {"block": None, "kv_cache_memory_bytes": 32 << 20}
    first, second = pair(model, {**common, **prefill}, {**common, **decode})
    prompts = [prompt(10 + length, length) for length in lengths]
    expected = [answer["tokens"] for answer in first.generate(*(request(tokens) for tokens in prompts))]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    offered = first.generate(*(request(tokens, 1, PREFILL) for tokens in prompts))
    params = [answer["params"] for answer in offered]
    answers = second.generate(*(request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)))
    assert [answer["tokens"] for answer in answers] == expected
    # Prefill does not see the last token: its state would be one too far. A prompt of one token is decode's own.
    assert second.call("metric", "vllm:kvferry_read") == sum(length > 1 for length in lengths)
    # The state is prefill's, which took the prompt for another one.
    tokens = prompt(1, lengths[-1])
    params, other = computed_as_another(first, tokens)
    assert said(second.generate(request(tokens, 12, params))) == alone(first, [other])
    # The rest of a prompt that decode has in part; and a prompt that goes on after what prefill has computed.
    [longer] = first.generate(request(prompts[-1], 1, PREFILL))
    [answer] = second.generate(request([*prompts[-1], 7, 8, 9], 12, longer["params"]))
    assert answer["tokens"] == first.generate(request([*prompts[-1], 7, 8, 9]))[0]["tokens"]


@pytest.mark.skipif(MINOR < 31, reason="refused with this vLLM: see test_states.py")
def test_gated_delta_nets_move(pair: Callable[..., tuple[Node, Node]], tmp_path: Path) -> None:
    """Linear attention as in Qwen3-Next, with experts. vLLM's kernels for CPU take it in bfloat16 only.

    A token that is computed alone, from the state before it, is rounded otherwise than in a whole prompt. Decode
    computes the last token alone. So each prompt ends with the first token that prefill says after the others: prefill
    computes that one alone, too, when it goes on.
    """
    settings: dict[str, Any] = {"block": None, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, **LAST_STATE}
    first, second = pair(make_gated_delta_model(tmp_path / "model"), settings, settings)
    lengths = (1, 32, 127, 128, 299)
    # One by one: how bfloat16 is rounded depends on what else is in the batch, too.
    for length in lengths:
        tokens = prompt(600 + length, length)
        [[last, *expected]] = said(first.generate(request(tokens, 13)))
        [offered] = first.generate(request([*tokens, last], 1, PREFILL))
        assert said(second.generate(request([*tokens, last], 12, offered["params"]))) == [expected]
    assert second.call("metric", "vllm:kvferry_read") == len(lengths)
    # The state is prefill's, which took the prompt for another one.
    tokens = prompt(1, lengths[-1])
    [[last, *expected]] = said(first.generate(request([token ^ 1 for token in tokens], 13)))
    params, _ = computed_as_another(first, [*tokens, last])
    assert said(second.generate(request([*tokens, last], 12, params))) == [expected]


def test_latent_attention_moves(pair: Callable[..., tuple[Node, Node]], tmp_path: Path) -> None:
    """One latent for all heads.

    On CPU, vLLM computes a last token whose context is in its cache in another way than a whole prompt, and the answers
    differ. So what decode says is compared with what prefill says of a prompt whose other tokens it has in its cache.
    Where vLLM keeps no prefix cache for the model, as on some processors, there is nothing to compare with but decode
    itself. vLLM's latent attention on processors with AMX takes no float32.
    """
    # The size of a block is the backend's choice: 16, or 32 with AMX.
    settings: dict[str, Any] = {"block": None, "dtype": "bfloat16"}
    first, second = pair(make_latent_model(tmp_path / "model"), settings, settings)
    prompts = [prompt(800 + blocks, blocks * BLOCK + 1) for blocks in (1, 2, 3)]
    answers: list[list[int]] = []
    # One by one: how bfloat16 is rounded depends on what else is in the batch.
    for tokens in prompts:
        first.generate(request(tokens))
        [expected] = first.generate(request(tokens))
        [offered] = first.generate(request(tokens, 1, PREFILL))
        answers.append(second.generate(request(tokens, 12, offered["params"]))[0]["tokens"])
        if first.call("metric", "vllm:prefix_cache_hits"):
            assert answers[-1] == expected["tokens"]
    assert second.call("metric", "vllm:kvferry_read") == len(prompts)
    # The cache is prefill's, which took the prompt for another one: decode continues both alike.
    tokens = prompt(1, len(prompts[-1]))
    params, other = computed_as_another(first, tokens)
    [again] = first.generate(request(other, 1, PREFILL))
    assert said(second.generate(request(tokens, 12, params))) == said(
        second.generate(request(other, 12, again["params"]))
    )
    assert second.call("metric", "vllm:kvferry_read") == len(prompts) + 2


def test_windows_that_begin_with_a_block_move(pair: Callable[..., tuple[Node, Node]], tmp_path: Path) -> None:
    """Decode computes the last token again, whose window begins one token before that of the next. Where a block begins
    between the two, prefill has freed it, unless it left the last token out."""
    window, block = 64, 32
    settings = {"disable_hybrid_kv_cache_manager": False, "block": block}
    prefill, decode = pair(make_model(tmp_path / "model", kv_heads=4, window=window), settings, settings)
    prompts = [prompt(500 + length, length) for length in range(94, 99)]
    expected = [answer["tokens"] for answer in prefill.generate(*(request(tokens) for tokens in prompts))]
    params = [answer["params"] for answer in prefill.generate(*(request(tokens, 1, PREFILL) for tokens in prompts))]
    requests = [request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)]
    assert [answer["tokens"] for answer in decode.generate(*requests)] == expected
    assert decode.call("metric", "vllm:kvferry_read") == len(prompts)


def test_window_blocks_in_decodes_prefix_cache_are_whole(
    pair: Callable[..., tuple[Node, Node]], tmp_path: Path
) -> None:
    """vLLM keeps every full block of a window that was read into, for other prompts that begin the same. One that ends
    earlier sees tokens of the first such block that the prompt that was read does not need."""
    settings = {"disable_hybrid_kv_cache_manager": False, "block": 32}
    prefill, decode = pair(make_model(tmp_path / "model", kv_heads=4, window=64), settings, settings)
    # The window begins at token 85, in the block of tokens 64 to 95.
    whole = prompt(900, 149)
    # The second prompt has four blocks in common with the first, and sees the first prompt's tokens from 65 on.
    other = [*whole[:128], *prompt(901, 3)]
    expected = [answer["tokens"] for answer in prefill.generate(request(whole), request(other))]
    [params] = [answer["params"] for answer in prefill.generate(request(whole, 1, PREFILL))]
    [first] = decode.generate(request(whole, 12, params))
    [second] = decode.generate(request(other))
    assert [first["tokens"], second["tokens"]] == expected
    assert decode.call("metric", "vllm:prefix_cache_hits") >= 128
