"""For any two engines, every wanted byte is right and no other is touched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.planner import Path, PathRule, expansion, plan_read
from tests.support.drawn_worlds import World, worlds
from tests.support.simulated_memories import move

PROFILE = settings.get_profile("plan")


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE)
@given(world=worlds(), lists=st.booleans(), path=st.sampled_from((None, Path.STAGED)))
def test_plans_move_every_byte_right_and_touch_no_other(world: World, lists: bool, path: Path | None) -> None:
    source, destination = world.source.geometry(), world.destination.geometry()
    rule = PathRule(path=path)
    plans = [plan_read(source, destination, rank, striping=world.striping, rule=rule) for rank in world.readers]
    with pytest.MonkeyPatch.context() as patch:
        if lists:
            patch.setattr(expansion, "OWN_LIST", 1)
        move(
            plans,
            world.source,
            world.destination,
            world.source_blocks,
            world.destination_blocks,
            world.length,
            world.tokens,
        )
