"""The table of mutated files keeps up with the code."""

from __future__ import annotations

from itertools import chain

from tests.mutation.mutants import mutants
from tests.mutation.targets import TARGETS
from tests.support.repository import ROOT


def test_files_and_tests_of_the_table_exist() -> None:
    """A missing test would end `make mutate` before it prints its results."""
    named = {*TARGETS, *chain.from_iterable(chain.from_iterable(target.stages) for target in TARGETS.values())}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_mutants_that_are_no_mistakes_are_made() -> None:
    for file, target in TARGETS.items():
        made = {mutant.name for mutant in mutants((ROOT / file).read_text())} if target.equivalent else set()
        assert sorted(target.equivalent.keys() - made) == [], file
