"""The table of mutated files keeps up with the repository: a missing test would end `make mutate` before its table."""

from __future__ import annotations

from itertools import chain

from tests.mutation.targets import TARGETS
from tests.support.repository import ROOT


def test_files_and_tests_of_the_table_exist() -> None:
    named = {*TARGETS, *chain.from_iterable(chain.from_iterable(target.stages) for target in TARGETS.values())}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
