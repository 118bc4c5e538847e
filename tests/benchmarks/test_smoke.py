"""Every topic runs and verifies its bytes, once and on small sizes; its times mean nothing."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from benchmarks.measures import SMOKE
from benchmarks.results import TopicResult
from benchmarks.topics import BESIDE_VLLM, PEERS, TOPICS, missing, run_topic

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_runs_and_its_reads_are_right(name: str) -> None:
    if name in BESIDE_VLLM and not find_spec("vllm"):
        pytest.skip("vLLM is not installed here: make test-vllm")
    if name in PEERS and (why := missing(name)):
        pytest.skip(why)
    topic = run_topic(name, SMOKE)
    assert topic.name == name
    assert all(math.isfinite(sample) and sample >= 0 for measure in topic.measures for sample in measure.samples)
    # Raises if two measures have one name, or one is compared with another that is not there.
    assert TopicResult.of(topic, (0.0, 0.0), 1.0).table().lines().count("\n") == 2 + len(topic.measures)
