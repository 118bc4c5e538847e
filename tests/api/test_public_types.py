"""What the public classes say of their arguments and results: types that a program can rely on."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
import kvferry.aio
import kvferry.engine
from kvferry import Cache, Client, EngineSession
from kvferry.aio import AsyncCache, AsyncClient, AsyncSession

PUBLIC: list[type] = [
    Client,
    Cache,
    EngineSession,
    kvferry.Read,
    kvferry.EmbeddedServer,
    AsyncClient,
    AsyncCache,
    AsyncSession,
    kvferry.engine.SchedulerPort,
    kvferry.engine.WorkerPort,
]
VALUES: list[type] = [
    kvferry.Publication,
    kvferry.Question,
    kvferry.Release,
    kvferry.ReadSummary,
    kvferry.ReadResult,
    kvferry.ReadProgress,
    kvferry.EngineSpec,
    kvferry.NixlOptions,
    kvferry.StagingOptions,
    kvferry.IntegrityOptions,
    kvferry.engine.SchedulerStats,
    kvferry.engine.Offer,
    kvferry.engine.Grant,
    kvferry.engine.RankEnd,
    kvferry.engine.WorkerOutput,
    kvferry.engine.ReadEnd,
    kvferry.engine.Finished,
]


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods and properties of a class, and its constructor where a user calls it."""
    inherited = {name: member for base in reversed(cls.__mro__[1:]) for name, member in vars(base).items()}
    for name, member in {**inherited, **vars(cls)}.items():
        function: Any = member.fget if isinstance(member, property) else member
        if name == "__init__" and cls in (Client, AsyncClient, *PUBLIC[-2:]):
            yield name, inspect.unwrap(function)
        if isinstance(function, classmethod):
            function = function.__func__
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, inspect.unwrap(function)


def parts(hint: object) -> Iterator[object]:
    """All types that an annotation is made of."""
    yield hint
    if typing.get_origin(hint) is not np.ndarray:
        for argument in typing.get_args(hint):
            yield from parts(argument)


def of_no_use(hint: object) -> bool:
    module = getattr(hint, "__module__", "") or ""
    return hint is Any or module.startswith(("kvferry.v1", "google.protobuf"))


@pytest.mark.parametrize("cls", [*PUBLIC, *VALUES], ids=lambda cls: cls.__name__)
def test_annotations_hold_no_any_and_no_message_of_the_wire(cls: type) -> None:
    found = [(name, hint) for name, method in methods(cls) for hint in typing.get_type_hints(method).items()]
    if dataclasses.is_dataclass(cls):
        found += [(cls.__name__, hint) for hint in typing.get_type_hints(cls).items()]
    assert found
    assert [(name, hint) for name, hint in found if any(map(of_no_use, parts(hint[1])))] == []


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_every_option_is_spelled_out(cls: type) -> None:
    for name, method in methods(cls):
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
        assert "return" in typing.get_type_hints(method) or name == "__init__", name


def options(method: Callable[..., Any], *, without: str = "self") -> list[tuple[str, object, object]]:
    """Names, types and defaults of a method's parameters."""
    hints = typing.get_type_hints(method)
    signature = inspect.signature(method).parameters.values()
    return [(each.name, hints.get(each.name), each.default) for each in signature if each.name != without]


@pytest.mark.parametrize(("sync", "later"), [(Client, AsyncClient), (Cache, AsyncCache), (EngineSession, AsyncSession)])
def test_asyncio_has_the_methods_of_threads(sync: type, later: type) -> None:
    mine, theirs = dict(methods(sync)), dict(methods(later))
    assert set(mine) == set(theirs)
    for name in theirs:
        assert options(theirs[name]) == options(mine[name]), name


def test_workers_register_as_clients_do() -> None:
    ours = {name: rest for name, *rest in options(kvferry.engine.WorkerPort.register)}
    theirs = {name: rest for name, *rest in options(Client.register_cache)}
    assert ours.pop("kv_caches") == theirs.pop("tensors")
    # The port has them from its constructor.
    for name in ("engine", "rank", "token"):
        theirs.pop(name)
    assert ours == theirs
