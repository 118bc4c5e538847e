"""Which steps of a publication its reader takes, and what they are together."""

from __future__ import annotations

import pytest

from kvferry._control import granted_steps
from kvferry._control.granted_steps import STEP_BYTES, GrantedSteps
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry import Blocks
from kvferry.geometry.blocks import Unfinished, runs_of
from kvferry.v1 import kv_transfer_pb2 as pb

NEW_FIELD = b"\xf8\x7f\x07"
"""Field 2047 with the value 7, which no message has."""


def part(group: str, first: int, end: int, *runs: tuple[int, int]) -> pb.GroupBlocks:
    starts, counts = [start for start, _ in runs], [count for _, count in runs]
    return pb.GroupBlocks(group=group, first_token=first, end_token=end, run_starts=starts, run_counts=counts)


def test_each_step_goes_on_in_each_of_its_groups_where_the_one_before_ended() -> None:
    steps = GrantedSteps()
    steps.add([pb.Blocks(step=0, groups=[part("full", 16, 48, (5, 2)), part("window", 32, 48, (1, 1))])])
    steps.add([pb.Blocks(step=1, groups=[part("full", 48, 64, (3, 1))])])
    steps.add([pb.Blocks(step=2, groups=[part("full", 64, 100, (9, 3)), part("window", 48, 64, (0, 1))])])
    assert len(steps) == 3
    blocks = steps.take().blocks
    assert {name: group.ids.tolist() for name, group in blocks.items()} == {
        "full": [5, 6, 3, 9, 10, 11],
        "window": [1, 0],
    }
    assert (blocks["full"].first_token, blocks["full"].end_token) == (16, 100)
    assert (blocks["window"].first_token, blocks["window"].end_token) == (32, 64)
    assert steps.take().blocks == {}


@pytest.mark.parametrize("first", [15, 17, 32])
def test_a_step_that_does_not_go_on_is_refused(first: int) -> None:
    steps = GrantedSteps()
    steps.add(
        [pb.Blocks(groups=[part("full", 0, 16, (1, 1))]), pb.Blocks(step=1, groups=[part("full", first, 48, (2, 1))])]
    )
    with pytest.raises(BlocksShort, match="tokens from 16") as caught:
        steps.take()
    assert (caught.value.values["group"], caught.value.values["side"]) == ("full", "source")


@pytest.mark.parametrize("numbers", [[1], [0, 0], [0, 2], [0, 1, 0]])
def test_a_step_that_is_not_the_next_one_is_refused(numbers: list[int]) -> None:
    steps = GrantedSteps()
    with pytest.raises(InvalidField, match="the next one") as caught:
        steps.add(pb.Blocks(step=number) for number in numbers)
    assert caught.value.values["value"] == str(numbers[-1])
    assert len(steps) == len(numbers) - 1


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_blocks_of_one_publication_have_a_limit_that_counts_steps_without_blocks_too(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    told = [pb.Blocks(step=0, groups=[part("full", 0, 16, (1, 1))]), pb.Blocks(step=1), pb.Blocks(step=2)]
    monkeypatch.setattr(granted_steps, "GRANT_BYTES", sum(step.ByteSize() + STEP_BYTES for step in told) + room)
    steps = GrantedSteps()
    steps.add(told[:2])
    if room < 0:
        with pytest.raises(InvalidField, match="size of a publication's blocks"):
            steps.add(told[2:])
    else:
        steps.add(told[2:])
    assert len(steps) == (2 if room < 0 else 3)


@pytest.mark.parametrize("most", [4, 5])
def test_the_blocks_of_all_groups_are_counted_together(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(granted_steps, "MAX_BLOCKS", most)
    told = [
        pb.Blocks(groups=[part("full", 0, 48, (1, 2), (9, 1)), part("window", 0, 16, (1, 1))]),
        pb.Blocks(step=1, groups=[part("full", 48, 64, (12, 1))]),
    ]
    steps = GrantedSteps()
    steps.add(told)
    if most < 5:
        with pytest.raises(InvalidField, match="number of blocks of all groups"):
            steps.take()
    else:
        assert steps.take().blocks["full"].ids.tolist() == [1, 2, 9, 12]


def named(step: int, *layers: str, begun: list[pb.GroupBlocks] | None = None) -> pb.Blocks:
    """A step that names layers, of these blocks or those of the step before."""
    return pb.Blocks(step=step, unfinished=pb.Unfinished(groups=begun or [], layers=layers))


def test_layers_of_unfinished_blocks_add_up_until_the_blocks_are_complete() -> None:
    steps = GrantedSteps()
    steps.add([pb.Blocks(groups=[part("full", 0, 16, (7, 1))]), named(1, "a", begun=[part("full", 16, 48, (1, 2))])])
    assert steps.gained
    assert steps.take().blocks["full"].ids.tolist() == [7]
    steps.add([named(2, "b", "a"), named(3, "c")])
    assert steps.gained
    taken = steps.take()
    assert taken.blocks == {}
    assert taken.unfinished == Unfinished(runs_of({"full": Blocks([1, 2], 16, 48)}), ("a", "b", "c"))
    steps.add([pb.Blocks(step=4, groups=[part("full", 16, 64, (1, 2), (9, 1))])])
    taken = steps.take()
    assert taken.blocks == {"full": Blocks([1, 2, 9], 16, 64)}
    assert taken.unfinished is None


@pytest.mark.parametrize(
    "complete",
    [
        [part("full", 16, 48, (1, 1), (3, 1))],
        [part("full", 16, 32, (1, 1))],
        [part("other", 0, 16, (1, 1))],
        [part("full", 32, 64, (1, 2))],
    ],
)
def test_complete_blocks_must_be_those_that_were_unfinished(complete: list[pb.GroupBlocks]) -> None:
    """Layers of the others may have been read already."""
    steps = GrantedSteps()
    steps.add([named(0, "a", begun=[part("full", 16, 48, (1, 2))]), pb.Blocks(step=1, groups=complete)])
    with pytest.raises(InvalidField, match="those of which it named layers before"):
        steps.take()


@pytest.mark.parametrize(
    "told",
    [
        [named(0, "a")],
        [named(0, "a", begun=[part("full", 0, 16, (1, 1))]), named(1, "b", begun=[part("full", 16, 32, (2, 1))])],
        [named(0, "a", begun=[part("full", 0, 1 << 30, (1, 1 << 25))])],
        [pb.Blocks(groups=[part("full", 0, 16, (1, 1))]), named(1, "a", begun=[part("full", 0, 16, (1, 1))])],
    ],
)
def test_layers_of_no_blocks_of_two_parts_or_of_too_many_blocks_are_refused(told: list[pb.Blocks]) -> None:
    steps = GrantedSteps()
    steps.add(told)
    with pytest.raises((InvalidField, BlocksShort)):
        steps.take()


def test_a_source_that_names_ever_more_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that names one more costs its reader as much as there are."""
    monkeypatch.setattr(granted_steps, "MAX_LAYERS", 3)
    steps = GrantedSteps()
    chunk = part("full", 0, 16, (1, 1))
    steps.add([named(0, "a", "b", begun=[chunk]), named(1, "b", "a"), named(2, "c"), pb.Blocks(step=3, groups=[chunk])])
    steps.take()
    steps.add([named(4, "d", "e", begun=[part("full", 16, 32, (2, 1))]), named(5, "f"), named(6, "g")])
    with pytest.raises(InvalidField, match="at most 3"):
        steps.take()


@pytest.mark.parametrize("blocks", [4, 5])
def test_unfinished_blocks_of_all_groups_are_counted_together(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(granted_steps, "MAX_UNFINISHED", 4)
    steps = GrantedSteps()
    steps.add([named(0, "a", begun=[part("full", 0, 32, (1, 2)), part("other", 0, 48, (1, blocks - 2))])])
    if blocks > 4:
        with pytest.raises(InvalidField, match="at most 4"):
            steps.take()
    else:
        assert steps.take().unfinished is not None


@pytest.mark.parametrize("newer", ["first", "afterwards"])
def test_a_home_of_another_version_takes_over_between_two_steps(newer: str) -> None:
    """One that does not know of unfinished blocks tells the same steps without them."""
    chunk = part("full", 0, 16, (1, 1))
    layered = [named(0, "a", begun=[chunk]), named(1, "b")]
    plain = [pb.Blocks(step=0), pb.Blocks(step=1)]
    before, after = (layered, plain) if newer == "first" else (plain, layered)
    steps = GrantedSteps()
    steps.add(before)
    assert steps.take().blocks == {}
    steps.again()
    steps.add([*after, pb.Blocks(step=2, groups=[chunk])])
    taken = steps.take()
    assert taken.blocks == {"full": Blocks([1], 0, 16)}
    assert taken.unfinished is None


def test_a_home_that_says_more_of_a_step_takes_over_between_two_steps() -> None:
    """Its release is a later one: this reader does not know the field."""
    group = part("full", 0, 16, (1, 1))
    more = pb.GroupBlocks.FromString(group.SerializeToString() + NEW_FIELD)
    plain, of_group = pb.Blocks(groups=[group]), pb.Blocks(groups=[more])
    of_step = pb.Blocks.FromString(plain.SerializeToString() + NEW_FIELD)
    for before, after in ((plain, of_step), (of_step, plain), (plain, of_group), (of_group, plain)):
        steps = GrantedSteps()
        steps.add([before])
        steps.again()
        steps.add([after])
        assert steps.take().blocks == {"full": Blocks([1], 0, 16)}
        steps.again()
        with pytest.raises(InvalidField, match="before its home restarted"):
            steps.add([pb.Blocks(groups=[part("full", 0, 16, (2, 1))])])
