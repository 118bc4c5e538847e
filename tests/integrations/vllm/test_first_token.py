"""What vLLM's connector publishes beside the cache: the first token of the answer, for engines that compute nothing of
a prompt.

vLLM's scheduler and kvferry's port are played; `tests/integrations/sglang/test_live_vllm.py` has real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvferry import Blocks, Group, router_reference
from kvferry._control.publications import Publication
from kvferry.engine import SchedulerPort
from kvferry.integrations.first_token import FirstToken, first_token
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.requests import REFERENCE
from kvferry.integrations.vllm.sending import Sending
from kvferry.integrations.vllm.setup import BlockTable, Setup
from kvferry.integrations.vllm.values import StepsDone

TOKENS, BLOCKS, TOKEN = 4, 32, 417
TABLE = BlockTable(0, Group("full", block_tokens=TOKENS, num_blocks=BLOCKS, null_block=0), TOKENS)


class Prefill:
    """A scheduler of vLLM with one request, whose prompt is computed in steps."""

    def __init__(self, *, withheld: int = 0) -> None:
        self.published: list[tuple[bool, bytes]] = []
        """Of each step of the publication: whether it is the last, and its payload."""
        setup = SimpleNamespace(
            spec=SimpleNamespace(num_ranks=1, engine_id="prefill"),
            tables=(TABLE,),
            sums=False,
            serves=True,
            withheld=withheld,
            rewritten=0,
            has_states=False,
            names_inputs=True,
            published=lambda ids, tokens: {"full": TABLE.published(ids[0], tokens)},
        )
        self.pool = BlockPool(BLOCKS, False, TOKENS)
        cache = SimpleNamespace(pool=self.pool, block_ids=lambda request_id: (self.ids,))
        ours = cast(Setup, setup), cast(SchedulerPort, self), cast(PrefixCache, cache)
        self.sending = Sending(*ours, [], lambda name: None)
        self.ids: list[int] = []

    def publish(
        self, request_id: str, blocks: Mapping[str, Blocks], *, last: bool, payload: bytes = b"", **_: Any
    ) -> Publication:
        self.published.append((last, payload))
        return Publication(1, request_id, "reference")

    def publish_more(
        self, publication: Publication, blocks: Any, *, last: bool, payload: bytes = b"", **_: Any
    ) -> None:
        self.published.append((last, payload))

    def run(self, *steps: int, routed: bool = True, answer: int = 1, ends: bool = True) -> None:
        """Compute a prompt in these steps, and sample an answer; the last step has ended on the device if `ends`."""
        tokens = sum(steps)
        reference = router_reference("127.0.0.1:1", "prefill") if routed else None
        request = SimpleNamespace(
            request_id="r",
            kv_transfer_params={"do_remote_decode": True, REFERENCE: reference},
            status=RequestStatus.RUNNING,
            num_computed_tokens=0,
            num_prompt_tokens=tokens,
            num_tokens=tokens,
            num_output_tokens=0,
            max_tokens=answer,
            all_token_ids=[*range(tokens), TOKEN],
            mm_features=[],
            prompt_embeds=None,
            cache_salt=None,
            lora_request=None,
            resumable=False,
            prompt_token_ids=list(range(tokens)),
            _all_token_ids=list(range(tokens)),
            get_skip_reading_prefix_cache=lambda: False,
        )
        self.sending.expect(request)
        # vLLM knows and computes what is left of the prompt.
        left = request.num_prompt_tokens
        steps = (*steps[:-1], steps[-1] - (tokens - left))
        tokens = request.num_tokens = left
        request.all_token_ids = [*request._all_token_ids, TOKEN]
        for count in [*steps, *[1] * (answer - 1)]:
            wanted = -(-(request.num_computed_tokens + count) // TOKENS) - len(self.ids)
            self.ids += [block.block_id for block in self.pool.get_new_blocks(wanted)]
            step = self.sending.begin({"r": count})
            request.num_computed_tokens += count
            if ends or request.num_computed_tokens < tokens:
                self.sending.computed({0: StepsDone(step, step)})
        request.num_tokens += answer
        request.num_output_tokens = answer
        request.all_token_ids += [TOKEN + 1] * (answer - 1)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.sending.finish(request, (self.ids,))


@pytest.mark.parametrize("routed", [False, True], ids=["when-it-has-finished", "in-parts"])
def test_the_first_token_comes_with_the_last_blocks(routed: bool) -> None:
    prefill = Prefill()
    prefill.run(6, 6, 2, routed=routed)
    *parts, (last, payload) = prefill.published
    assert parts == ([(False, b"")] * 2 if routed else [])
    assert last
    assert first_token(payload) == FirstToken(TOKEN, 14)


@pytest.mark.parametrize("routed", [False, True], ids=["when-it-has-finished", "in-parts"])
def test_first_token_waits_with_the_blocks_for_the_device(routed: bool) -> None:
    prefill = Prefill()
    prefill.run(6, 8, routed=routed, ends=False)
    # The publication is known, or begun, and not complete.
    assert prefill.published == [(False, b"")]
    prefill.sending.computed({0: StepsDone(2, 2)})
    (_, (last, payload)) = prefill.published
    assert last
    assert first_token(payload) == FirstToken(TOKEN, 14)


def test_answer_of_several_tokens_has_no_first_token_payload() -> None:
    """The publication has more than the prompt, and the token behind it is not the first of the answer."""
    prefill = Prefill()
    prefill.run(6, answer=3)
    assert prefill.published[-1] == (True, b"")


def test_prompt_whose_end_decode_computes_has_no_first_token_payload() -> None:
    """The token that was sampled is one of the prompt's."""
    prefill = Prefill(withheld=1)
    prefill.run(6)
    assert prefill.published[-1] == (True, b"")
