"""The marks cover all that a read takes (R14): a state beside the tokens, too, and nothing that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvferry import Blocks, Cache, EngineSpec, Group, GroupKind, Prompt
from kvferry.engine import SchedulerPort
from kvferry.errors import InvalidField, PromptMismatch, PromptUnmarked
from kvferry.geometry.tensors import planes_of, planes_of_tensor
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON
from tests.testing.stepping_engines import THEIRS, TOKENS, Decode, Prefill

FULL, STATE = Group("full", block_tokens=4, num_blocks=8), Group("state", GroupKind.STATE, num_blocks=8)
IDS = list(range(24))
PROMPT, WHOLE = Prompt(IDS[:16]), Prompt(IDS[:16]).followed_by(IDS[16:])
REQUIRED = "require"


def engine(fabric: Fabric, name: str, groups: Sequence[Group] = (FULL, STATE), check: str = "compare") -> Cache:
    full, states = np.ones((2, 8, 4, 1, 2), np.uint16), np.ones((8, 1, 2), np.uint16)
    planes = planes_of({"attention": full}, ("kv", "block", "token", "head", "content"), FULL)
    tensors: dict[str, npt.NDArray[np.uint16]] = {"attention": full}
    if STATE in groups:
        planes += tuple(planes_of_tensor(states, ("block", "head", "content"), STATE, "recurrent", ("ssm",)))
        tensors["recurrent"] = states
    client = fabric.client(prompt_check=check)
    return client.register_cache(EngineSpec(name, tuple(groups)), tensors=tensors, planes=planes)


def blocks(tokens: int, state: int) -> dict[str, Blocks]:
    return {"full": Blocks(range(1, 1 + tokens // 4), end_token=tokens), "state": Blocks([1], state_token=state)}


def published(fabric: Fabric, tokens: int, state: int, prompt: Prompt) -> str:
    return engine(fabric, "p").session.publish("theirs", blocks(tokens, state), prompt=prompt).reference


def granted(port: SchedulerPort, reference: str, prompt: Prompt, *, progressive: bool = False) -> None:
    port.acquire("mine", reference, prompt=prompt, progressive=progressive)
    until(lambda: port.granted("mine") is not None)


def test_a_state_behind_the_tokens_is_covered_as_well(fabric: Fabric) -> None:
    """The source has generated 8 tokens of which it says nothing. The state has seen them."""
    reference = published(fabric, 24, 24, PROMPT)
    read = engine(fabric, "d", check=REQUIRED).read(reference, blocks(16, 24), tokens=(0, 16), prompt=WHOLE)
    with pytest.raises(PromptUnmarked):
        read.result(SOON)
    port = SchedulerPort(fabric.client(prompt_check=REQUIRED), EngineSpec("e", (FULL, STATE)))
    granted(port, reference, WHOLE)
    with pytest.raises(PromptUnmarked):
        port.attach("mine", blocks(16, 24), (0, 16))


def test_a_state_that_a_read_requested_before_its_publication_is_covered(fabric: Fabric) -> None:
    source = engine(fabric, "p").session
    publication = source.publish("theirs", {"full": Blocks([1, 2], end_token=8)}, last=False, prompt=PROMPT)
    reader = engine(fabric, "d", check=REQUIRED)
    read = reader.read(publication.reference, blocks(16, 24), tokens=(0, 16), prompt=WHOLE, progressive=True)
    rest = {"full": Blocks([3, 4, 5, 6], 8, 24), "state": Blocks([1], state_token=24)}
    source.publish_more(publication, rest, last=True)
    with pytest.raises(PromptUnmarked):
        read.result(SOON)


def test_tokens_that_a_read_leaves_out_need_no_mark(fabric: Fabric) -> None:
    """Its own blocks say where it ends; behind that the source has generated."""
    reference = published(fabric, 24, 16, WHOLE)
    reader = engine(fabric, "d", check=REQUIRED)
    reader.read(reference, blocks(16, 16), prompt=PROMPT).result(SOON)


def test_a_group_that_the_reader_lacks_needs_no_mark(fabric: Fabric) -> None:
    reference = published(fabric, 16, 24, PROMPT)
    reader = engine(fabric, "d", (FULL,), check=REQUIRED)
    reader.read(reference, {"full": Blocks([1, 2, 3, 4])}, prompt=PROMPT).result(SOON)


def test_a_prompt_that_does_not_go_with_the_tokens_leaves_the_request_as_it_was(fabric: Fabric) -> None:
    source = engine(fabric, "p").session
    publication = source.publish("theirs", {"full": Blocks([1, 2], end_token=8)}, last=False)
    port = SchedulerPort(fabric.client(), EngineSpec("d", (FULL, STATE)))
    granted(port, publication.reference, PROMPT, progressive=True)
    with pytest.raises(InvalidField, match="at most the prompt's 2 tokens"):
        port.attach("mine", blocks(16, 16), (0, 16), prompt=Prompt([8, 9]))
    rest = {"full": Blocks([3, 4], 8, 16), "state": Blocks([1], state_token=16)}
    source.publish_more(publication, rest, last=True, prompt=PROMPT)
    until(lambda: (offer := port.granted("mine")) is not None and offer.complete)
    port.attach("mine", blocks(16, 16), (0, 16))


def test_a_read_of_another_prompt_hands_out_no_payload(fabric: Fabric) -> None:
    """It has the first token of somebody else's answer. That it is another prompt shows with the last step only: where
    the reader's ends, this one goes on."""
    prefill, decode = Prefill(fabric), Decode(fabric)
    begun = Prompt(IDS[:8])
    prefill.session.publish_more(prefill.publication, {}, last=False, prompt=begun)
    prefill.compute(8)
    decode.worker.start(decode.attached(prefill, prompt=Prompt(IDS[:TOKENS])))
    rest = {"full": Blocks(THEIRS[2:], 8, TOKENS + 2)}
    longer = begun.followed_by([*IDS[8:20], 1, 2, 3])
    assert longer.ends == (8, TOKENS + 1)
    prefill.session.publish_more(prefill.publication, rest, last=True, prompt=longer, payload=b"first token")
    decode.until(lambda: decode.ended)
    (end,) = decode.ended
    assert isinstance(end.error, PromptMismatch)
    assert end.payload == b""
