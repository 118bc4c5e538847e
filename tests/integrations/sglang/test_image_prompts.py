"""Requests with images between two instances: they are told apart by what the images show."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import Instance, named, some_room
from tests.support.sglang_images import ARGUMENTS, IMAGE, make_vision_model, picture
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

HOLD = 3
TEXT = f"w1 w2 w3 {IMAGE} w4 w5 {IMAGE} w6"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    folder = tmp_path_factory.mktemp("home")
    with NodeServerProcess(folder, tcp=True, ttl=20, max_ttl=20, hold=HOLD) as made:
        yield made


@pytest.fixture(scope="module")
def instances(server: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Instance]]:
    """One instance alone, prefill, and decode, which has a prefix cache."""
    folder = tmp_path_factory.mktemp("images")
    model = make_vision_model(folder / "model")
    modes = {"null": [], "prefill": [], "decode": ["--disaggregation-decode-enable-radix-cache", "--enable-metrics"]}
    made = [
        Instance(model, folder / f"{mode}.log", mode, server.address, *ARGUMENTS, *more, tokenizer=True)
        for mode, more in modes.items()
    ]
    try:
        yield [instance.ready() for instance in made]
    finally:
        for instance in made:
            instance.close()


def said(instance: Instance, *pictures: int, **more: Any) -> Any:
    """Return an instance's answer to the text with these images."""
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    images = [picture(seed) for seed in pictures]
    return instance.post("/generate", {"text": TEXT, "image_data": images, "sampling_params": sampling, **more})


def test_images_are_distinguished_by_their_content(instances: list[Instance], server: NodeServerProcess) -> None:
    """Two images of as many tokens, and the same two the other way round, are other prompts; the same ones are not."""
    single, prefill, decode = instances
    wanted = [(1, 2), (2, 1), (1, 3)]
    alone = [said(single, *pictures)["output_ids"] for pictures in wanted]
    assert len({tuple(tokens) for tokens in alone}) == 3
    for _ in range(2):
        for pictures, tokens in zip(wanted, alone, strict=True):
            for other in [each for each in wanted if each != pictures]:
                room = some_room()
                with ThreadPoolExecutor(1) as pool:
                    first = pool.submit(said, prefill, *other, **named(prefill, room))
                    assert "PromptMismatch" in str(said(decode, *pictures, **named(prefill, room)))
                    first.result()
            room = some_room()
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(said, prefill, *pictures, **named(prefill, room))
                assert said(decode, *pictures, **named(prefill, room))["output_ids"] == tokens
                first.result()
    assert decode.counted("kvferry_reader_prompts", prompt="matched") == decode.counted("kvferry_reader_prompts") > 0
    until(lambda: pinned(server) == 0)
