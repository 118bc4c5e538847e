"""docs/errors.md is current, has every error, and says of each what to do."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvferry import errors
from kvferry.v1 import errors_pb2
from tests.support.repository import ROOT

ENTRY = re.compile(r"^### (\w+)\n\n(.+?)(?=\n##|\Z)", re.MULTILINE | re.DOTALL)
ENTRIES = dict(ENTRY.findall((ROOT / "docs" / "errors.md").read_text()))
CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.KvferryError) and (cls.reason or not cls.__subclasses__())
]
AFTER_A_PAUSE = {"ENGINE_ID_IN_USE", "LIMIT"}
"""What comes with RetryInfo though its code alone does not ask to repeat the call."""


def test_the_page_is_made_from_the_protos_and_the_exceptions() -> None:
    command = [sys.executable, "-m", "scripts.errors_page", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reasons_of_the_contract_all_have_an_entry() -> None:
    reasons = set(errors_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert len(reasons) > 30
    assert reasons - set(ENTRIES) == set()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_entry_shows_the_status_of_programs_and_the_next_step(cls: type[errors.KvferryError]) -> None:
    entry = ENTRIES[cls.reason or cls.__name__]
    said, _, next_step = entry.partition("**Next step:** ")
    assert len(next_step.split()) >= 5
    assert len(said.split("\n\n")[-2].split()) >= 3
    if cls.reason:
        assert f"`{cls.__name__}` · {cls.code}" in said
    repeated = cls.reason in AFTER_A_PAUSE or cls.rebuilt("", {}).retryable
    assert ("repeat it" in said) is repeated
    assert ("after its pause" in said) is (cls.reason in AFTER_A_PAUSE)
