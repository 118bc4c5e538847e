"""What is registered: which heads every rank holds is said, and memory that cannot be read into is refused, by name."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry import Client, EngineSpec, Group, Interval, MemoryKind, MemoryRegion, TokenShard
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import BadGeometry, InvalidField, InvalidInput
from kvferry.geometry.formats import vllm_attention
from kvferry.geometry.tensors import Holding, TensorView, held, planes_of
from tests.api.conftest import AXES, BLOCKS, TOKENS, array
from tests.support.identifiers import unique_id

GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
NOWHERE = "unix:/nonexistent/node.sock"
"""Nothing may be sent before arguments are right."""


def spec(ranks: int = 1) -> EngineSpec:
    return EngineSpec(unique_id("engine"), (GROUP,), ranks)


def registered(ranks: int = 2, **memory: Any) -> None:
    """Register, without a node server; raises what is wrong with the arguments."""
    token = "kvt1." if ranks > 1 else None
    with Client(NOWHERE) as client:
        memory.setdefault("tensors", {"l": array()})
        client.register_cache(spec(ranks), 0, token=token, timeout=0.01, **memory)


# Which heads.


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"axes": AXES}, "heads"),
        ({}, "heads"),
        ({"axes": AXES, "holding": Holding()}, "holding.units"),
        ({"axes": AXES, "holding": Holding(units=Interval(0, 2))}, "holding.units"),
        ({"axes": AXES, "holding": Holding(token_shard=TokenShard(0, 2))}, "holding.units"),
        ({"axes": AXES, "heads": range(2)}, "total_heads"),
        ({"axes": AXES, "total_heads": 4}, "heads"),
        ({"axes": AXES, "heads": range(2), "total_heads": 4, "replicated": True}, "replicated"),
        ({"axes": AXES, "holding": Holding(), "replicated": True}, "replicated"),
        ({"axes": AXES, "heads": range(2), "total_heads": 4, "holding": Holding()}, "holding"),
        ({"axes": AXES, "heads": range(0, 4, 2), "total_heads": 4}, "heads"),
        ({"axes": AXES, "heads": range(2, 2), "total_heads": 4}, "heads"),
        ({"axes": AXES, "heads": [0, 1], "total_heads": 4}, "heads"),
        ({"axes": AXES, "heads": (0, 2), "total_heads": 4}, "heads"),
        ({"axes": AXES, "heads": range(2, 4), "total_heads": 3}, "total_heads"),
        ({"axes": AXES, "heads": range(2, 4), "total_heads": True}, "total_heads"),
        ({"axes": AXES, "replicated": "no"}, "replicated"),
    ],
    ids=str,
)
def test_a_rank_of_several_names_its_heads(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        registered(**arguments)
    assert raised.value.values["field"] == field


def test_planes_that_were_made_without_heads_are_not_taken_for_replicas() -> None:
    tensor = np.zeros((BLOCKS, 2, TOKENS, 8), np.uint8)
    silent = vllm_attention({"l": tensor}, GROUP)
    with pytest.raises(InvalidField, match="replicated is False, expected True if every rank of 2"):
        registered(tensors={"l": tensor}, planes=silent)
    with pytest.raises(InvalidField, match="replicated"):
        registered(tensors=None, planes=silent, regions=[MemoryRegion(MemoryKind.DRAM, 0, 1 << 20, 1 << 20)])
    with pytest.raises(InvalidField, match="token"):
        registered(tensors={"l": tensor}, planes=silent, replicated=True)
    halves = vllm_attention({"l": tensor}, GROUP, Holding(units=Interval(2, 4), axis_size=4))
    with pytest.raises(InvalidField, match="token"):
        registered(tensors={"l": tensor}, planes=halves)


@pytest.mark.parametrize(
    "said",
    [
        lambda rank: {"heads": range(2 * rank, 2 * rank + 2), "total_heads": 4},
        lambda rank: {"heads": Interval(2 * rank, 2 * rank + 2), "total_heads": np.int64(4)},
        lambda rank: {"holding": Holding(units=Interval(2 * rank, 2 * rank + 2), axis_size=4)},
    ],
    ids=["heads", "interval", "holding"],
)
def test_heads_given_in_each_way_are_the_same(node: str, said: Callable[[int], dict[str, Any]]) -> None:
    with Client(node) as client:
        engine = spec(2)
        scheduler = SchedulerPort(client, engine)
        for rank in range(2):
            port = WorkerPort(client, engine, rank)
            cache = port.register({"l": array()}, axes=AXES, **said(rank))
            held = {(plane.units, plane.axis_size) for plane in cache.rank.planes}
            assert held == {(Interval(2 * rank, 2 * rank + 2), 4)}
        scheduler.close()


def test_replicas_are_registered_as_such(node: str) -> None:
    with Client(node) as client:
        engine = spec(2)
        scheduler = SchedulerPort(client, engine)
        for rank in range(2):
            cache = WorkerPort(client, engine, rank).register({"l": array()}, axes=AXES, replicated=True)
            assert {plane.units for plane in cache.rank.planes} == {Interval(0, 2)}
        scheduler.close()


# Which memory.


def read_only_map(tmp_path: Path) -> np.ndarray[Any, Any]:
    path = tmp_path / "memory"
    path.write_bytes(bytes(array().nbytes))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, np.uint32).reshape(array().shape)


def frozen() -> np.ndarray[Any, Any]:
    made = array()
    made.flags.writeable = False
    return made


def reaching_out() -> np.ndarray[Any, Any]:
    return np.lib.stride_tricks.as_strided(np.zeros(16, np.uint32), array().shape, array().strides)


def shrunk() -> torch.Tensor:
    made = torch.zeros(array().shape, dtype=torch.int32)
    made.untyped_storage().resize_(64)
    return made


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        # torch is about to drop them.
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(array().shape), 0.1, 0, torch.qint8)


class Producer:
    """An array of a library that kvferry does not know, which has DLPack only."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Copies(Producer):
    """An array whose library hands out copies, as DLPack lets it where the caller does not say otherwise."""

    def __dlpack__(self, **options: Any) -> Any:
        if options:
            raise TypeError("options are not known here")
        return self._array.copy().__dlpack__()


class Fails(Producer):
    """An array whose library fails."""

    def __dlpack__(self, **options: Any) -> Any:
        raise ValueError("the array was donated")


class Interface:
    """An array of a library that kvferry does not know, which has an ``__array_interface__`` only."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


@pytest.mark.parametrize("made", [Producer, Interface, memoryview], ids=lambda made: made.__name__)
def test_arrays_of_other_libraries_are_shared_and_not_copied(made: Callable[[Any], Any]) -> None:
    memory = array()
    foreign = made(memory)
    assert planes_of({"l": foreign}, AXES, GROUP) == planes_of({"l": memory}, AXES, GROUP)
    own: Any = held(foreign)
    own[:] = 7
    assert (memory == 7).all()


def test_types_that_numpy_lacks_are_shared_with_torch() -> None:
    memory = torch.zeros(array().shape, dtype=torch.bfloat16)
    planes = planes_of({"l": Producer(memory)}, AXES, GROUP)  # type: ignore[dict-item]
    assert planes == planes_of({"l": memory}, AXES, GROUP)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: np.frombuffer(bytes(array().nbytes), np.uint32).reshape(array().shape), "read-only"),
        (frozen, "read-only"),
        (lambda: np.broadcast_to(np.uint32(0), array().shape), "read-only"),
        (lambda: np.empty(array().shape, object), "pointers"),
        (lambda: np.zeros(array().shape, [("a", "u2"), ("b", "u2")]), "structured"),
        (lambda: np.zeros(array().shape, "S0"), "no number"),
        (lambda: np.zeros(array().shape, "S4"), "no number"),
        (lambda: np.zeros(array().shape, "M8[s]"), "no number"),
        (lambda: np.zeros(array().shape, np.dtype(np.uint32).newbyteorder()), "byte order"),
        (reaching_out, "reaches past"),
        (shrunk, "reaches past"),
        (lambda: np.zeros((2, 0, 2, TOKENS, 4)), "holds nothing"),
        (lambda: array()[:, ::-1], "runs backwards"),
        (lambda: torch.zeros(array().shape, device="meta"), "meta"),
        (quantised, "scales and zero points"),
        (lambda: b"1234", "read-only"),
        (lambda: Producer(np.broadcast_to(np.uint32(0), array().shape)), "read-only"),
        (lambda: Copies(array()), "gives copies of its memory"),
        (lambda: Fails(array()), "ValueError: the array was donated"),
        (lambda: np.ndarray, "does not share its memory: TypeError"),
        (lambda: None, "does not share its memory: TypeError"),
        (lambda: [[1, 2]], "does not share its memory: TypeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("serve", [True, False])
def test_memory_that_cannot_be_read_into_is_refused_by_name(made: Callable[[], Any], problem: str, serve: bool) -> None:
    with pytest.raises(BadGeometry, match=r"layer layers\.7: ") as raised:
        registered(1, tensors={"layers.7": made()}, axes=AXES, serve=serve)
    assert problem in raised.value.values["problem"]


def test_a_read_only_map_is_refused_also_by_its_addresses(tmp_path: Path) -> None:
    """Also as a torch tensor, which does not know that its memory is read-only."""
    mapped = read_only_map(tmp_path)
    with pytest.raises(BadGeometry, match="read-only"):
        registered(1, tensors={"l": mapped}, axes=AXES)
    unknowing = TensorView(mapped.ctypes.data, mapped.shape, mapped.strides, 4, "uint32")
    with pytest.raises(InvalidField, match=r"memory of plane l/key is .* expected .* writable"):
        registered(1, tensors={"l": unknowing}, axes=AXES)
    region = MemoryRegion(MemoryKind.DRAM, 0, mapped.ctypes.data, mapped.nbytes)
    planes = planes_of({"l": unknowing}, AXES, GROUP)
    with pytest.raises(InvalidField, match=r"memory of plane l/key is .* expected .* writable"):
        registered(1, tensors=None, planes=planes, regions=[region])
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(mapped.view(np.int32))
    with pytest.raises(InvalidField, match="memory of plane l/key"):
        registered(1, tensors={"l": tensor}, axes=AXES)


def test_addresses_that_are_not_mapped_are_refused() -> None:
    mapped = mmap.mmap(-1, 1 << 20)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    view = TensorView(base, array().shape, array().strides, 4, "uint32")
    planes = planes_of({"l": view}, AXES, GROUP)
    size = array().nbytes
    for wrong in (0x1000, (1 << 47) - 4096):
        with pytest.raises(InvalidInput):
            registered(
                1,
                tensors=None,
                planes=planes_of({"l": TensorView(wrong, view.shape, view.strides, 4, "uint32")}, AXES, GROUP),
                regions=[MemoryRegion(MemoryKind.DRAM, 0, wrong, size)],
            )
    # The region is registered whole, so all of it has to be there.
    with pytest.raises(InvalidField, match="mapped and writable"):
        registered(1, tensors=None, planes=planes, regions=[MemoryRegion(MemoryKind.DRAM, 0, base, 1 << 40)])


@pytest.mark.parametrize("name", [b"mod\xe8le.safetensors", b"page\x0cfeed", b"next\xc2\x85line"])
def test_other_mapped_memory_does_not_matter(node: str, tmp_path: Path, name: bytes) -> None:
    """The list of mappings has the names of files, which are any bytes."""
    with (tmp_path / os.fsdecode(name)).open("w+b") as file:
        file.truncate(1 << 16)
        mapped = mmap.mmap(file.fileno(), 0)
    with Client(node) as client:
        client.register_cache(spec(), tensors={"l": array()}, axes=AXES, serve=False)
    mapped.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.uint8, torch.bool])
def test_dtypes_of_engines_are_taken(node: str, dtype: torch.dtype) -> None:
    with Client(node) as client:
        client.register_cache(spec(), tensors={"l": torch.zeros(array().shape, dtype=dtype)}, axes=AXES, serve=False)
