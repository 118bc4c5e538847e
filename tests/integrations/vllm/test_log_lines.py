"""kvferry's log lines in vLLM's processes. What a real one writes: test_self_check.py."""

from __future__ import annotations

import io
import logging
import logging.config
from collections.abc import Iterator

import pytest

from kvferry.integrations.vllm.registration import _log_as_vllm


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Loggers as they are in a new process, and afterwards as they were."""
    named = [logging.getLogger(name) for name in ("kvferry", "vllm")]
    kept = [(logger.handlers[:], logger.level, logger.propagate) for logger in named]
    for logger in named:
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    yield
    for logger, (handlers, level, logger.propagate) in zip(named, kept, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)


def shown_by(name: str, format: str, level: str = "INFO") -> io.StringIO:
    """Configure a logger as vLLM configures its own; what it then writes."""
    stream = io.StringIO()
    configured = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"f": {"format": format}},
        "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": stream}},
        "loggers": {name: {"handlers": ["h"], "level": level, "propagate": False}},
    }
    logging.config.dictConfig(configured)
    return stream


def say() -> None:
    logger = logging.getLogger("kvferry.engine.somewhere")
    logger.debug("a detail")
    logger.info("an info")
    logger.warning("a warning")


def test_lines_look_like_those_of_vllm_also_after_it_configures_its_logger_again() -> None:
    _log_as_vllm()
    _log_as_vllm()
    stream = shown_by("vllm", "%(levelname)s %(name)s %(message)s")
    say()
    where = "kvferry.engine.somewhere"
    assert stream.getvalue().splitlines() == [f"INFO {where} an info", f"WARNING {where} a warning"]
    again = shown_by("vllm", "%(message)s", "DEBUG")
    say()
    assert again.getvalue().splitlines() == ["a detail", "an info", "a warning"]


def test_configuration_of_the_application_stays() -> None:
    before = shown_by("kvferry", "mine: %(message)s", "WARNING")
    vllms = shown_by("vllm", "%(message)s")
    _log_as_vllm()
    say()
    assert before.getvalue() == "mine: a warning\n"
    after = shown_by("kvferry", "then: %(message)s")
    say()
    assert after.getvalue().splitlines() == ["then: an info", "then: a warning"]
    assert vllms.getvalue() == ""


def test_lines_go_to_the_root_if_vllm_leaves_logging_to_the_application(caplog: pytest.LogCaptureFixture) -> None:
    """With VLLM_CONFIGURE_LOGGING=0. The root's level counts, as for vLLM's own."""
    _log_as_vllm()
    with caplog.at_level(logging.INFO):
        say()
    with caplog.at_level(logging.ERROR):
        say()
    assert [record.getMessage() for record in caplog.records] == ["an info", "a warning"]
