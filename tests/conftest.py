"""What all tests share: in CI, a test that was skipped has failed, unless it is known that it cannot run."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.support.examples import SAME, examples

# No test fails for want of time: how long an example takes says more of the machine.
settings.register_profile(
    "unhurried",
    max_examples=examples(100),
    derandomize=SAME,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.load_profile("unhurried")

# UCX patches the C library of each process that uses it, to learn what memory is unmapped, and calls sched_yield some
# 400,000 times meanwhile: half a second of a core for each rank of a test. `tests/e2e/test_demo.py` runs with them.
os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")

# Where a script started the tests in the background, they ignore SIGINT, and so would the programs that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

KNOWN_SKIPS = (
    "there is no GPU",
    # These run in machines that `make test-rdma` boots.
    "there is no RDMA device",
    "machines with RDMA are started by",
    # What `make test-deployed` makes.
    "images and systems are made by",
    "network namespaces need",
    "network namespaces cannot be made here",
    # Of the doctor's, which change what their process sees.
    "no PID namespaces here",
    "no time namespaces here",
    "no network namespaces here",
    "no mount namespaces here",
    "no Python that user nobody can run",
    "this kernel gives none",
    # Large, or not in Debian; `.ci/run` installs the other servers.
    "vLLM is not installed here",
    "mooncake.engine is not installed here",
    "SGLang's router is not installed here",
    "kubectl is not installed",
    "no memory cgroup can be made here",
)
"""Beginnings of the reasons that CI accepts."""

_unknown: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Stands here because pytest asks no other folder's conftest.py for options."""
    parser.addoption("--device", default="cuda", choices=("cuda", "cpu"), help="where tests/gpu keeps its caches")


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_hypothesis_test(getattr(item, "obj", None)):
        item.add_marker("property")


def pytest_collection_finish() -> None:
    # A full collection would look at all collected tests: 230 ms for 6,000, in the middle of what a test measures.
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not reason.startswith(KNOWN_SKIPS):
            _unknown.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _unknown:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _unknown:
        terminalreporter.section("skipped, which CI does not accept")
        for line in _unknown:
            terminalreporter.line(line)
