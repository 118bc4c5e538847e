"""Which part of a request can be read with each step that its source publishes, so that all parts together read what
one read of the whole would, each byte once. Pure.

A part of a group ends at the last token that the source has published so far and at which both sides' granules may be
cut (`ReadPlan.cut_below`); inside a block of the destination, if need be. Windows and states are read with the last
step, and so is what is left of all groups. A request that is published at once has one part.

Of blocks whose layers are complete one after the other, a part has the layers that are complete. These layers are then
ahead of the others, until all are complete.

Replicas share each part among them, not the whole request, so that every part is read from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol, TypeAlias

from kvferry._arguments import token_range
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks, Unfinished, joined
from kvferry.geometry.model import EngineGeometry, Group, GroupKind
from kvferry.planner.expansion import Expansion, together
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

    def of_layers(self, layers: Collection[str]) -> Plan:
        """See `ReadPlan`."""

    @property
    def layers(self) -> frozenset[str]:
        """See `ReadPlan`."""


NextPart: TypeAlias = Callable[[Mapping[str, int], dict[str, int]], dict[str, GroupRequest]]
"""Given where the next part of some layers begins, by group, returns what to read of them, and notes where the part
after it begins."""


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
        self._layers_ahead: frozenset[str] = frozenset()
        """Layers of which more was read than of the others."""
        self._ahead: dict[str, int] = {}
        """Where the part that is read next of these layers begins, by group; absent: where that of the others does."""
        self._checked = False

    def next(self, steps: Mapping[str, Blocks], unfinished: Unfinished | None = None, *, last: bool) -> Expansion:
        """What can be read now and could not before.

        Args:
            steps: the blocks that the source has published since the call before, by group; one step or several.
            unfinished: the blocks after these of which only some layers are complete now; None: there are none.
            last: the source publishes no more.

        Raises:
            InvalidField: the last step has not come, and no tokens were asked.
            BadBlock, BlocksShort, InvalidField: see `ReadPlan.expand`.
        """
        self.granted = joined((self.granted, steps))
        if last:
            return together(self._expanded(self._rest))
        if self._tokens is None:
            raise InvalidField("tokens", None, "the tokens to read, since the publication is not complete")
        self._check(self._tokens)
        parts = self._expanded(partial(self._so_far, self._tokens))
        if unfinished is not None:
            parts += self._some_layers(self._tokens, unfinished)
        return together(parts)

    def _expanded(self, wanted: NextPart) -> list[Expansion]:
        """Expand what is wanted of each layer."""
        until = dict(self._moved)
        if not self._ahead:
            found = [self._plan.expand_needed(wanted(self._moved, until))]
        else:
            further = {**self._moved, **self._ahead}
            apart = (
                (self._plan.layers - self._layers_ahead, wanted(self._moved, until)),
                (self._layers_ahead, wanted(further, until)),
            )
            found = [self._plan.of_layers(layers).expand_needed(of) for layers, of in apart if of]
        self._moved = until
        self._ahead = {name: end for name, end in self._ahead.items() if end > until.get(name, end - 1)}
        if not self._ahead:
            self._layers_ahead = frozenset()
        return found

    def _some_layers(self, tokens: tuple[int, int], unfinished: Unfinished) -> list[Expansion]:
        """Expand the layers that are complete in blocks in which others are not, as far as they were not read."""
        layers = self._plan.layers.intersection(unfinished.layers) - self._layers_ahead
        if not layers:
            return []
        plan, wanted = self._plan.of_layers(layers), dict[str, GroupRequest]()
        begun = {runs.group: runs.blocks() for runs in unfinished.groups}
        for group in self._plan.groups:
            more = begun.get(group.name)
            if more is None or more.end_token is None or group.kind is not GroupKind.TOKENS:
                continue
            theirs = joined(({name: of for name, of in self.granted.items() if name == group.name}, {group.name: more}))
            begin = self._moved.get(group.name, tokens[0])
            end = self._plan.cut_below(group.name, min(more.end_token, tokens[1]))
            if begin < end:
                found = needed((group,), self._source_groups, theirs, self._destination, (begin, end))
                if found:
                    self._ahead[group.name] = end
                    wanted |= found
        if not wanted:
            return []
        self._layers_ahead |= layers
        return [plan.expand_needed(wanted)]

    def _rest(self, moved: Mapping[str, int], until: dict[str, int]) -> dict[str, GroupRequest]:
        """All that was not read, of all groups."""
        whole = [group for group in self._plan.groups if group.name not in moved]
        wanted = needed(whole, self._source_groups, self.granted, self._destination, self._tokens)
        for name, begin in moved.items():
            if self._tokens is not None:
                wanted |= self._needed(name, (begin, self._tokens[1]))
        return wanted

    def _check(self, tokens: tuple[int, int]) -> None:
        """Check once what no part can check by itself."""
        if not self._checked:
            # Each part is checked by itself; that no block is in two of them, only here.
            groups = self._plan.groups
            for group in groups:
                if group.name not in self._destination:
                    # The last step would find it, after all bytes have moved.
                    raise missing(group.name)
            mine = {group.name: self._destination[group.name] for group in groups}
            written(groups, promised(groups, self.granted, mine), mine, tokens)
            self._checked = True

    def _so_far(
        self, tokens: tuple[int, int], moved: Mapping[str, int], until: dict[str, int]
    ) -> dict[str, GroupRequest]:
        """What can be read before the last step."""
        wanted: dict[str, GroupRequest] = {}
        for group in self._plan.groups:
            theirs = self.granted.get(group.name)
            # What is rewritten while the source computes is read at the end, even if the home tells of it before.
            if theirs is None or theirs.end_token is None or group.kind is not GroupKind.TOKENS:
                continue
            begin = moved.get(group.name, tokens[0])
            end = self._plan.cut_below(group.name, min(theirs.end_token, tokens[1]))
            found = self._needed(group.name, (begin, end)) if begin < end else {}
            if found:
                until[group.name] = end
                wanted |= found
        return wanted

    def _needed(self, name: str, tokens: tuple[int, int]) -> dict[str, GroupRequest]:
        of = [group for group in self._plan.groups if group.name == name]
        return needed(of, self._source_groups, self.granted, self._destination, tokens)
