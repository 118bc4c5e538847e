"""Which part of a request can be read with each step that its source publishes, so that all parts together read what
one read of the whole would, each byte once. Pure.

A part of a group ends at the last token that the source has published so far and at which both sides' granules may be
cut (`ReadPlan.cut_below`); inside a block of the destination, if need be. Windows and states are read with the last
step, and so is what is left of all groups. A request that is published at once has one part.

Replicas share each part among them, not the whole request, so that every part is read from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvferry._arguments import token_range
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks, joined
from kvferry.geometry.model import EngineGeometry, Group, GroupKind
from kvferry.planner.expansion import Expansion
from kvferry.planner.request_blocks import GroupRequest, missing, needed, promised, written


class Plan(Protocol):
    """What the parts of a request need of a `ReadPlan`."""

    @property
    def source(self) -> EngineGeometry:
        """See `ReadPlan`."""

    @property
    def destination(self) -> EngineGeometry:
        """See `ReadPlan`."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """See `ReadPlan`."""

    def cut_below(self, group: str, token: int) -> int:
        """See `ReadPlan`."""

    def expand_needed(self, wanted: Mapping[str, GroupRequest]) -> Expansion:
        """See `ReadPlan`."""


class RequestParts:
    """One request of one destination rank, read in parts. Not thread-safe.

    Args:
        plan: the rank's.
        destination: the blocks to read into, by group.
        tokens: the tokens asked, ``[a, b)``; None: all that the source publishes, which then has one step.

    Attributes:
        granted: the blocks that the source has published so far, by group.

    Raises:
        InvalidField: groups that this engine does not have.
    """

    def __init__(self, plan: Plan, destination: Mapping[str, Blocks], tokens: tuple[int, int] | None) -> None:
        known = {group.name for group in plan.destination.groups}
        for name in destination:
            if name not in known:
                raise InvalidField("group", name, f"one of {sorted(known)}")
        self._plan = plan
        self._source_groups = {group.name: group for group in plan.source.groups}
        self._destination = destination
        self._tokens = token_range(tokens)
        self.granted: dict[str, Blocks] = {}
        self._moved: dict[str, int] = {}
        """Where the part that is read next begins, by group; absent: nothing was read of the group."""
        self._checked = False

    def next(self, steps: Mapping[str, Blocks], *, last: bool) -> Expansion:
        """What can be read now and could not before.

        Args:
            steps: the blocks that the source has published since the call before, by group; one step or several.
            last: the source publishes no more.

        Raises:
            InvalidField: the last step has not come, and no tokens were asked.
            BadBlock, BlocksShort, InvalidField: see `ReadPlan.expand`.
        """
        self.granted = joined((self.granted, steps))
        return self._plan.expand_needed(self._rest() if last else self._so_far())

    def _rest(self) -> dict[str, GroupRequest]:
        """All that was not read, of all groups."""
        whole = [group for group in self._plan.groups if group.name not in self._moved]
        wanted = needed(whole, self._source_groups, self.granted, self._destination, self._tokens)
        for name, moved in self._moved.items():
            if self._tokens is not None:
                wanted |= self._needed(name, (moved, self._tokens[1]))
        return wanted

    def _so_far(self) -> dict[str, GroupRequest]:
        """What can be read before the last step."""
        if self._tokens is None:
            raise InvalidField("tokens", None, "the tokens to read, since the publication is not complete")
        if not self._checked:
            # Each part is checked by itself; that no block is in two of them, only here.
            groups = self._plan.groups
            for group in groups:
                if group.name not in self._destination:
                    # The last step would find it, after all bytes have moved.
                    raise missing(group.name)
            mine = {group.name: self._destination[group.name] for group in groups}
            written(groups, promised(groups, self.granted, mine), mine, self._tokens)
            self._checked = True
        wanted: dict[str, GroupRequest] = {}
        for group in self._plan.groups:
            theirs = self.granted.get(group.name)
            # What is rewritten while the source computes is read at the end, even if the home tells of it before.
            if theirs is None or theirs.end_token is None or group.kind is not GroupKind.TOKENS:
                continue
            begin = self._moved.get(group.name, self._tokens[0])
            end = self._plan.cut_below(group.name, min(theirs.end_token, self._tokens[1]))
            found = self._needed(group.name, (begin, end)) if begin < end else {}
            if found:
                self._moved[group.name] = end
                wanted |= found
        return wanted

    def _needed(self, name: str, tokens: tuple[int, int]) -> dict[str, GroupRequest]:
        of = [group for group in self._plan.groups if group.name == name]
        return needed(of, self._source_groups, self.granted, self._destination, tokens)
