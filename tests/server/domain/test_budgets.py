"""Errors of budgets."""

from __future__ import annotations

import pytest

from kvferry.errors import LimitReached
from kvferry_server.domain.limits import LOCAL, Budget, check_budget


@pytest.mark.parametrize(("holder", "named"), [(None, LOCAL), ("", LOCAL), ("10.0.0.1", "10.0.0.1")])
def test_a_full_budget_names_who_has_taken_it(holder: str | None, named: str) -> None:
    budget = Budget(4)
    budget.take(holder, 4)
    with pytest.raises(LimitReached) as caught:
        check_budget("router_keys", budget, holder, 1.0)
    assert f"4 of them by {named}, which" in caught.value.message
