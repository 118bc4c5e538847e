"""The engines and node servers that faults happen to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.faults.fault_world import World


class Keeper:
    """Has a world that works. One that a scenario left broken is replaced."""

    def __init__(self, folders: pytest.TempPathFactory, *, optimistic: bool) -> None:
        self._folders = folders
        self._optimistic = optimistic
        self._world: World | None = None

    def world(self) -> World:
        """The world."""
        if self._world is not None and not self._world.sound:
            self.close()
        if self._world is None:
            self._world = World(self._folders.mktemp("world"), optimistic=self._optimistic).ready()
        return self._world

    def close(self) -> None:
        """End it."""
        world, self._world = self._world, None
        if world is not None:
            world.close()


def kept(folders: pytest.TempPathFactory, *, optimistic: bool) -> Iterator[Keeper]:
    made = Keeper(folders, optimistic=optimistic)
    yield made
    made.close()


@pytest.fixture(scope="package")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    """Of the one world that most scenarios happen in, one after the other."""
    yield from kept(tmp_path_factory, optimistic=False)


@pytest.fixture
def world(keeper: Keeper) -> World:
    """A world that works, whose reads have leases."""
    return keeper.world()


@pytest.fixture(scope="package")
def optimistic_keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    yield from kept(tmp_path_factory, optimistic=True)


@pytest.fixture
def optimistic_world(optimistic_keeper: Keeper) -> World:
    """A world that works, whose short reads have no lease."""
    return optimistic_keeper.world()
