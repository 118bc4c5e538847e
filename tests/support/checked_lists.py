"""The lists of descriptors that a plan's last check sees, to be checked again with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvferry.errors import InvalidField
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.expansion import Expansion
from kvferry.planner.footprint import Footprint, Windows


@dataclass(frozen=True)
class CheckedList:
    """One list, with the blocks of the request and the windows of its planes."""

    footprint: Footprint
    theirs: Windows
    mine: Windows
    made: Descriptors

    def refuses(self, made: Descriptors) -> bool:
        try:
            self.footprint.check(self.theirs, self.mine, made)
        except InvalidField as error:
            return "of the request's blocks" in error.message
        return False


def checked_lists(expand: Callable[[], Expansion]) -> list[CheckedList]:
    found: list[CheckedList] = []
    check = Footprint.check

    def noted(footprint: Footprint, theirs: Windows, mine: Windows, made: Descriptors) -> None:
        found.append(CheckedList(footprint, theirs, mine, made))
        check(footprint, theirs, mine, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Footprint, "check", noted)
        expand()
    return found
