"""Pictures of plans: who would read what from whom, for two engines of this home, as the planner draws it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import InvalidField, LimitReached
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.explain_svg import to_svg
from kvferry.planner.plan import ReadPlan, plan_read
from kvferry_server.admin.limits import MAX_PICTURE_CELLS, PICTURE_SECONDS
from kvferry_server.admin.node_state import NodeState


class Pictures:
    """Draws plans on a thread of its own, one at a time. Its owner closes it.

    Args:
        node: the node server.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._thread = ThreadPoolExecutor(1, "kvferry-picture")
        self._drawing = False

    async def draw(self, source_id: str, destination_id: str) -> str:
        """Return how one engine would read from another, as an SVG document.

        Raises:
            LimitReached: another picture is being drawn.
            InvalidField: the engines have too many ranks for a picture.
            KvferryError: an engine is not here or not complete, or cannot read from the other.
        """
        if self._drawing:
            raise LimitReached("pictures: one is being drawn", retry_after=1.0, limit="pictures", value=1)
        self._drawing = True
        try:
            source, destination = await self._geometry(source_id), await self._geometry(destination_id)
            cells = len(source.ranks) * len(destination.ranks)
            if cells > MAX_PICTURE_CELLS:
                problem = f"at most {MAX_PICTURE_CELLS} pairs of ranks; `kvferry plan` draws more"
                raise InvalidField("destination", f"{cells} pairs of ranks", problem)
            return await asyncio.get_running_loop().run_in_executor(self._thread, _drawn, source, destination)
        finally:
            self._drawing = False

    def close(self) -> None:
        """Stop the thread, once it has drawn what it draws."""
        self._thread.shutdown(wait=False)

    async def _geometry(self, engine_id: str) -> EngineGeometry:
        with self._node.home.turn():
            description = self._node.home.engines.find_live(engine_id).check_readable()
        # Made there when it is first needed; see `EngineDescription`.
        return await self._node.worker.run("", 0, lambda: description.geometry)


def _drawn(source: EngineGeometry, destination: EngineGeometry) -> str:
    until = time.monotonic() + PICTURE_SECONDS
    plans: list[ReadPlan] = []
    for rank in destination.ranks:
        if plans and time.monotonic() > until:
            raise InvalidField("destination", destination.engine_id, "engines whose plans are made sooner")
        plans.append(plan_read(source, destination, rank.rank))
    return to_svg(plans)
