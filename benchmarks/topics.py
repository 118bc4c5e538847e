"""The topics of the suite, and how one is run: in a process of its own, so that nothing of one stays for the next."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

from benchmarks.measures import Effort, Topic
from benchmarks.results import TopicResult

TOPICS = (
    "small_reads",
    "server_calls",
    "large_reads",
    "pages",
    "tcp_reads",
    "paths",
    "tcp_paths",
    "handshakes",
    "engine_steps",
    "spinning",
    "first_reads",
    "fleet",
    "lengths",
    "integrity",
    "expand",
)
"""Modules of this package, each with a function `run`."""


def measured(name: str, effort: Effort) -> TopicResult:
    """Run one topic in a new process."""
    before, began = os.getloadavg()[0], time.monotonic()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        topic = process.submit(run_topic, name, effort).result()
    return TopicResult.of(topic, (round(before, 2), round(os.getloadavg()[0], 2)), time.monotonic() - began)


def run_topic(name: str, effort: Effort) -> Topic:
    """Run one topic in this process."""
    topic: Topic = import_module(f"benchmarks.{name}").run(effort)
    return topic
