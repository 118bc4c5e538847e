"""Every public method, with every argument wrong in turn: a typed error at the call, and the engine goes on."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest

import kvferry
from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineGeometry,
    EngineSession,
    EngineSpec,
    EngineToken,
    Group,
    GroupKind,
    IntegrityOptions,
    Interval,
    Listing,
    MemoryKind,
    MemoryRegion,
    MissReason,
    NixlOptions,
    Plane,
    Prompt,
    PromptInput,
    Question,
    RankGeometry,
    StagingOptions,
    TokenShard,
    open_directory,
)
from kvferry._control.publish import Publish
from kvferry.engine import Grant, SchedulerPort, WorkerOutput, WorkerPort
from kvferry.errors import InvalidField, KvferryError
from kvferry.geometry import formats, shard, shards
from kvferry.geometry.tensors import Holding, Part, TensorView, planes_of, planes_of_tensor
from kvferry.host_memory import HostMemory
from tests.api.conftest import AXES, BLOCKS, TOKENS, array
from tests.support.identifiers import unique_id
from tests.support.offering import offered

GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
PLANE = planes_of({"l": array()}, AXES, GROUP)[0]


def question() -> Question:
    """One that no home has asked."""
    return Question(1, "kvf1.", Prompt([1]), 0, "asker", math.inf)


class Sneaky(int):
    """An integer that says of itself that it is another."""

    def __index__(self) -> int:
        return 7


NOT_AN_INTEGER: list[Any] = [None, True, 1.0, "1", b"1", [1], math.nan, np.float32(1), 1 + 0j]
NEGATIVE: list[Any] = [-1, np.int64(-1), -(2**70)]
HUGE: list[Any] = [2**63, 2**64, 2**70, np.uint64(2**63)]
NUMBER = [*NOT_AN_INTEGER, *NEGATIVE, *HUGE]
SECONDS: list[Any] = [None, True, "1", b"1", [1], math.nan, math.inf, -1, -math.inf, 1e300, 2**2000]
TEXT: list[Any] = [None, 1, b"text", ["text"], object(), "\ud800"]
PROMPT: list[Any] = [None, 1, "prompt", [1, 2], object()]
FLAG: list[Any] = [None, 1, 0, "no", [], object()]
BLOCKS_BY_GROUP: list[Any] = [
    None,
    1,
    "full",
    [("full", Blocks([1]))],
    {"full": [1]},
    {"full": np.array([1])},
    {"full": None},
    {1: Blocks([1])},
    {b"full": Blocks([1])},
    {"other": Blocks([1])},
    {"full": Blocks([BLOCKS])},
    {"full": Blocks([-1])},
    {"full": Blocks([2**31 - 1])},
    Blocks([1]),
]
PAYLOAD: list[Any] = [None, "text", 1, [1], b"x" * 65_537]
TOKEN_RANGE: list[Any] = [1, (1,), (1, 2, 3), ("a", "b"), (0.0, 1.0), (True, 2), (2, 1), (-1, 2), "ab", {0, 1}]
IDS: list[Any] = [
    None, 1, "12", b"12", [1.0], [None], ["1"], [[1], [2, 3]], [2**31], [-(2**31) - 1], [2**70],
    np.array([1.0]), np.array([[1]]), np.array(["1"]), iter([1]), {1, 2}, {1: 2}, range(2**25), object(),
]  # fmt: skip
MAPPING: list[Any] = [None, 1, "text", [("a", "b")], {"seed": 7}, {1: "a"}, {"a": None}, {"a": b"b"}, {"\ud800": "a"}]
LABELS: list[Any] = [1, "text", {"a": "b"}, {1: 1}, {"a": 1.0}, {"a": None}]


@dataclass(frozen=True)
class Case:
    """A call whose arguments are right, and for each what is wrong instead."""

    name: str
    call: Callable[..., Any]
    right: dict[str, Any]
    wrong: dict[str, list[Any]]


def constructors() -> Iterator[Case]:
    yield Case(
        "Blocks",
        Blocks,
        {"ids": [1]},
        {"ids": IDS, "first_token": NUMBER, "end_token": NUMBER[1:], "state_token": NUMBER},
    )
    yield Case(
        "Interval",
        Interval,
        {"begin": 0, "end": 2},
        {"begin": [*NOT_AN_INTEGER, *NEGATIVE, 2], "end": [*NOT_AN_INTEGER, *NEGATIVE]},
    )
    yield Case(
        "TokenShard",
        TokenShard,
        {"index": 0, "count": 2},
        {name: [*NOT_AN_INTEGER, *NEGATIVE] for name in ("index", "count", "interleave")},
    )
    yield Case(
        "Group",
        Group,
        {"name": "full", "block_tokens": 16, "num_blocks": 8},
        {
            "name": [*TEXT, "", "x" * 129],
            "kind": [None, 1, "TOKENS", GroupKind.STATE, GroupKind.WINDOW],
            "block_tokens": [*NUMBER, 0],
            "num_blocks": [*NUMBER, 0],
            "null_block": [*NUMBER[1:], 8],
            "window_tokens": [*NUMBER, 1],
            "pool": TEXT,
        },
    )
    integers = [field for field, kind in Plane.__annotations__.items() if kind == "int"]
    right = {field: getattr(PLANE, field) for field in Plane.__annotations__}
    yield Case(
        "Plane",
        Plane,
        right,
        {field: [*NOT_AN_INTEGER, *NEGATIVE, *HUGE] for field in integers}
        | dict.fromkeys(("layer", "component", "group", "format", "dtype"), TEXT)
        | {
            "memory_kind": [None, 1, "DRAM"],
            "units": [None, (0, 2), range(2), TokenShard()],
            "token_shard": [None, 0, (0, 1, 1), Interval(0, 1)],
            "tokens_per_state": [None, 0, -1, 1.0, "1", True, Fraction(-1)],
            "units_divide": FLAG,
            "optional_cover": FLAG,
            "shared": FLAG,
        },
    )
    yield Case(
        "MemoryRegion",
        MemoryRegion,
        {"memory_kind": MemoryKind.DRAM, "device": 0, "base": 4096, "length": 4096},
        {
            "memory_kind": [None, 1, "DRAM"],
            "device": [*NOT_AN_INTEGER, *NEGATIVE],
            "base": NUMBER,
            "length": [*NUMBER, 0],
        },
    )
    yield Case(
        "RankGeometry",
        RankGeometry,
        {"rank": 0, "planes": (PLANE,)},
        {
            "rank": [*NOT_AN_INTEGER, *NEGATIVE],
            "planes": [None, PLANE, {"l": PLANE}, [1], "planes", [PLANE, PLANE]],
            "labels": [None, *LABELS],
        },
    )
    yield Case(
        "EngineGeometry",
        EngineGeometry,
        {"engine_id": "e", "groups": (GROUP,), "ranks": ()},
        {
            "engine_id": TEXT,
            "groups": [None, GROUP, [1], [GROUP, GROUP]],
            "ranks": [None, 1, [1]],
            "identity": MAPPING,
            "incarnation": [None, "x" * 16],
        },
    )
    yield Case(
        "EngineSpec",
        EngineSpec,
        {"engine_id": "e", "groups": (GROUP,)},
        {
            "engine_id": [*TEXT, "", "x" * 257],
            "groups": [None, GROUP, [], [1], ["full"], {"full": GROUP}, [GROUP, GROUP]],
            "num_ranks": [*NOT_AN_INTEGER, *NEGATIVE, 0],
            "partial": FLAG,
            "identity": MAPPING,
        },
    )
    yield Case(
        "Prompt",
        Prompt,
        {"token_ids": [1, 2, 3]},
        {
            "token_ids": [
                None,
                1,
                "123",
                b"123",
                [-1],
                [2**32],
                [1.0],
                ["1"],
                [None],
                np.array([[1]]),
                np.array([0.5]),
            ],
            "adapter": TEXT,
            "inputs": [None, 1, [1], ["image"], PromptInput(0, 1)],
        },
    )
    yield Case(
        "PromptInput",
        PromptInput,
        {"offset": 0, "length": 1, "identifier": "image"},
        {"offset": NUMBER, "length": NUMBER, "identifier": TEXT},
    )
    yield Case(
        "Holding",
        Holding,
        {},
        {
            "units": [1, (0, 1), range(2)],
            "axis_size": NOT_AN_INTEGER[1:],
            "token_shard": [None, 0],
            "tokens_per_state": [None, 0, -1, 1.0, True],
            "format": TEXT,
            "dtype": TEXT[1:],
            "token_granule": [*NOT_AN_INTEGER, *NEGATIVE],
            "units_divide": FLAG,
            "optional_cover": FLAG,
            "shared": FLAG,
        },
    )
    yield Case(
        "Part",
        Part,
        {"component": "key"},
        {"component": TEXT, "kv": NOT_AN_INTEGER[1:], "content": [1, (0, 1)], "units": [1], "format": TEXT[1:]},
    )
    yield Case(
        "TensorView",
        TensorView,
        {"address": 4096, "shape": (2, 2), "strides": (2, 1), "itemsize": 1, "dtype": "uint8"},
        {
            "address": NUMBER,
            "shape": [None, 2, (2,), (0, 2), ("a", 1), (2.0, 2), (2**70, 2)],
            "strides": [None, 2, (2,), (-2, 1), (2.0, 1)],
            "itemsize": [*NUMBER, 0],
            "dtype": TEXT,
            "memory_kind": [None, 1],
            "device": [*NOT_AN_INTEGER, *NEGATIVE],
        },
    )
    tensor = array()
    yield Case(
        "planes_of",
        planes_of,
        {"tensors": {"l": tensor}, "axes": AXES, "group": GROUP},
        {
            "tensors": [None, [tensor], tensor, {"l": None}, {"l": [1]}, {1: tensor}, "l"],
            "axes": [
                "kv block head token content",
                1,
                [1, 2, 3, 4, 5],
                AXES[:-1],
                ("kv", "block", "block", "token", "content"),
            ],
            "group": [None, "full", {"name": "full"}],
            "holding": [1, Interval(0, 2), range(2)],
            "components": [1, [1], {"key": "a"}, {"key": 0}, {1: 2}, "key"],
        },
    )
    packed = np.zeros((BLOCKS, 2, TOKENS, 8), np.uint8)
    caches: list[Any] = [None, [packed], packed, {"l": [1]}, {1: packed}]
    for name in ("vllm_attention", "vllm_cpu", "vllm_mla"):
        right = {"kv_caches": {"l": packed}, "group": GROUP}
        extra: dict[str, dict[str, Any]] = {"vllm_cpu": {"isa": "vec"}, "vllm_mla": {"latent_dim": 4}}
        more = extra.get(name, {})
        wrong: dict[str, list[Any]] = {"kv_caches": caches, "group": [None, "full"], "holding": [1]}
        wrong |= {"isa": [*TEXT, ""]} if "isa" in more else {}
        wrong |= {"latent_dim": [*NOT_AN_INTEGER, *NEGATIVE, 0, 9]} if "latent_dim" in more else {}
        yield Case(name, getattr(formats, name), right | more, wrong)
    yield Case(
        "planes_of, axes unknown",
        planes_of,
        {"tensors": {"l": np.zeros((BLOCKS, 64), np.uint8)}, "axes": None, "group": GROUP},
        {"tensors": [None, [tensor], {"l": 1}, {1: tensor}], "group": [None, "full"], "holding": [1]},
    )
    yield Case(
        "planes_of_tensor",
        planes_of_tensor,
        {"tensor": tensor, "axes": AXES, "group": GROUP, "layers": "l"},
        {"layers": [None, 1, b"l", ["a", "b"], [1], []]},
    )
    for function, least in ((shard, 3), (shards, 2)):
        names = list(inspect.signature(function).parameters)
        yield Case(
            function.__name__,
            function,
            dict(zip(names, (1, 2, 4) if least == 3 else (1, 2), strict=False)),
            {n: [*NOT_AN_INTEGER, *NEGATIVE, 0][: None if n != "index" else -1] for n in names},
        )
    yield Case(
        "HostMemory",
        HostMemory,
        {"size": 4096},
        {"size": [*NOT_AN_INTEGER, *NEGATIVE, 0]},
    )
    for options, fields in (
        (
            NixlOptions,
            (
                "tcp_segment",
                "chunk_bytes",
                "chunk_descriptors",
                "bytes_in_flight",
                "bytes_in_flight_total",
                "retired_agents",
            ),
        ),
        (StagingOptions, ("slot_bytes", "slots")),
    ):
        yield Case(options.__name__, options, {}, {name: [*NOT_AN_INTEGER, *NEGATIVE] for name in fields})
    yield Case("NixlOptions agents", NixlOptions, {}, {"reading_agents": [*NOT_AN_INTEGER[1:], *NEGATIVE, 0]})
    yield Case(
        "NixlOptions times",
        NixlOptions,
        {},
        dict.fromkeys(("tcp_user_timeout", "warm_up_timeout", "fence_time"), SECONDS) | {"ucx_tls": TEXT},
    )
    yield Case(
        "IntegrityOptions",
        IntegrityOptions,
        {},
        {"mode": TEXT, "rate": [None, "1", True, math.nan, 2, 0], "patience": SECONDS},
    )
    yield Case(
        "Listing",
        Listing,
        {"engine_id": "prefill", "home": "10.0.0.1:7423"},
        {
            "engine_id": TEXT,
            "home": TEXT,
            "incarnation": [None, 1, "0123456789abcdef", b"short", [1]],
            "labels": [None, 1, "a", {"a": 1}, {1: "a"}],
        },
    )
    prompt, wrong_tokens = Prompt([1, 2]), [None, 1, "12", b"12", [1.0], ["1"], [[1]], [-1], [2**32], {1, 2}, {1: 2}]
    yield Case("Prompt.followed_by", prompt.followed_by, {"token_ids": [1]}, {"token_ids": wrong_tokens})
    yield Case("Prompt.digest", prompt.digest, {"end": 1}, {"end": [*NUMBER, 0, 3]})
    yield Case("Prompt.mark", prompt.mark, {"key": b"k" * 16, "end": 1}, {"key": PAYLOAD[:-1], "end": [*NUMBER, 0, 3]})
    yield Case("Directory opened", open_directory, {"url": "file:/nowhere.json"}, {"url": TEXT})
    yield Case(
        "EngineToken.parse",
        EngineToken.parse,
        {"text": str(EngineToken("e", b"s" * 32, "h"))},
        {"text": TEXT},
    )


CONSTRUCTORS = list(constructors())


@pytest.mark.parametrize("case", CONSTRUCTORS, ids=lambda case: case.name)
def test_constructors_refuse_wrong_arguments(case: Case) -> None:
    case.call(**case.right)
    assert_refused(case)


def test_integers_become_plain_python_integers() -> None:
    given: dict[str, Any] = {
        field: np.int64(value) if type(value) is int else value for field, value in right_plane().items()
    }
    plane = Plane(**given)
    assert plane == PLANE
    assert type(plane.base + plane.block_stride) is int
    assert type(Interval(np.int8(0), np.int8(2)).end) is int  # type: ignore[arg-type]
    blocks = Blocks([1], np.int16(1), np.uint8(2), np.int64(0))  # type: ignore[arg-type]
    assert {type(blocks.first_token), type(blocks.end_token), type(blocks.state_token)} == {int}
    assert Blocks([1], first_token=Sneaky(3)).first_token in (3, 7)
    assert type(Blocks([1], first_token=Sneaky(3)).first_token) is int


def right_plane() -> dict[str, Any]:
    return {field: getattr(PLANE, field) for field in Plane.__annotations__}


@pytest.fixture(scope="module")
def cases(node: str) -> Iterator[list[Case]]:
    """Methods of objects that live, among them a read that waits and a publication that is held."""
    threads = threading.active_count()
    errors: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, errors.append
    with Client(node) as client, ExitStack() as ports:
        yield list(methods(node, client, ports))
    threading.excepthook = before
    assert not errors, f"on a thread: {errors[0].exc_value!r}"
    assert threading.active_count() <= threads + 8


def methods(node: str, client: Client, ports: ExitStack) -> Iterator[Case]:
    spec = EngineSpec(unique_id("victim"), (GROUP,))
    cache: Cache = client.register_cache(spec, tensors={"l": array()}, axes=AXES)
    session: EngineSession = cache.session
    publication, send = offered(session, Publish("offered", {"full": Blocks([60])}))
    send()
    more = session.publish("more", {"full": Blocks([61])}, last=False)
    reference: list[Any] = [None, 1, b"kvf1.", publication, "", "kvf1.", "text", "kvf1." + "A" * 5000]
    publications: list[Any] = [None, 1, publication.number, publication.reference, "offered"]
    yield Case(
        "Client",
        Client,
        {"address": node},
        {
            "address": TEXT,
            "tls": ["text", {}],
            "allowed_homes": [None, "host:1", 1, [1]],
            "options": [{}, 1],
            "staging": [{}],
            "integrity": ["full"],
            "prompt_check": [None, True, 1, "", "never", "COMPARE", ["off"], {}],
        },
    )
    yield Case("open_engine", client.open_engine, {}, {"spec": [None, "engine", GROUP]})
    yield Case("open_engine timeout", client.open_engine, {"spec": spec}, {"timeout": [*SECONDS, 0]})
    yield Case(
        "register_cache",
        client.register_cache,
        {"engine": spec, "tensors": {"l": array()}, "axes": AXES},
        {
            "engine": [None, "engine", GROUP],
            "rank": [*NUMBER, 1],
            "tensors": [None, [array()], array(), {"l": None}, {1: array()}],
            "axes": ["kv", 1, [1]],
            "holding": [1, Interval(0, 2)],
            "planes": [1, [1], PLANE],
            "regions": [[], 1, "r"],
            "labels": LABELS,
            "token": [1, b"kvt1.", "text", object()],
            "serve": FLAG,
            "replicated": FLAG,
            "timeout": [*SECONDS, 0],
        },
    )
    yield Case("decline", client.decline, {}, {"reference": reference})
    wrong_publish = {
        "request_id": [*TEXT, "", "x" * 257],
        "blocks": [*BLOCKS_BY_GROUP, {"full": Blocks([1, 1])}],
        "last": FLAG,
        "expected_reads": [*NUMBER, 0],
        "payload": PAYLOAD,
        "checksums": FLAG,
        "prompt": PROMPT,
    }
    right_publish = {"request_id": "r", "blocks": {"full": Blocks([1])}}
    yield Case("publish", session.publish, right_publish, wrong_publish)
    yield Case("publish timeout", session.publish, right_publish, {"timeout": [*SECONDS, 0]})
    yield Case(
        "publish_more",
        session.publish_more,
        {"publication": more, "blocks": {"full": Blocks([2], first_token=16)}, "last": False},
        {
            "publication": publications,
            "blocks": BLOCKS_BY_GROUP,
            "last": FLAG,
            "payload": PAYLOAD,
            "timeout": [*SECONDS, 0],
            "prompt": PROMPT,
        },
    )
    yield Case("abort", session.abort, {"publication": more}, {"publication": publications, "timeout": [*SECONDS, 0]})
    yield Case("released", session.released, {}, {"timeout": SECONDS})
    yield Case(
        "read",
        cache.read,
        {"reference": publication.reference, "blocks": {"full": Blocks([1])}},
        {
            "reference": reference,
            "blocks": BLOCKS_BY_GROUP,
            "tokens": TOKEN_RANGE,
            "layers": ["l", 1, [1], ["other"], [b"l"]],
            "read_id": [1, b"id", "", "\ud800"],
            "parties": [*NUMBER, 0, 2],
            "expected_reads": NUMBER,
            "timeout": [*SECONDS, 0],
            "allow_overlap": FLAG,
            "prompt": PROMPT,
        },
    )
    wrong_question = {
        "engine": [*reference, publication.reference],
        "prompt": [*PROMPT, Prompt.unknown],
        "wait": [*SECONDS, 0, 2.1],
        "timeout": [*SECONDS, 0],
        "traceparent": TEXT,
    }
    right_question = {"engine": cache.engine_reference, "prompt": Prompt([1, 2, 3])}
    right_fetch = right_question | {"blocks": {"full": Blocks([1])}}
    wrong_fetch = wrong_question | {"blocks": BLOCKS_BY_GROUP, "allow_overlap": FLAG}
    yield Case("fetch", cache.fetch, right_fetch, wrong_fetch)
    yield Case("questions", session.questions, {}, {"timeout": SECONDS})
    right_miss = {"question": question(), "reason": MissReason.BUSY}
    wrong_miss: dict[str, list[Any]] = {
        "question": [None, 1, "kvf1.", publication],
        "reason": [None, 1, "BUSY", MissReason.NO_ANSWER],
    }
    yield Case("miss", session.miss, right_miss, wrong_miss)
    yield Case(
        "checksum",
        cache.checksum,
        {"publication": publication.number, "blocks": {"full": Blocks([60])}},
        {
            "publication": [*NUMBER, 0, publication],
            "blocks": BLOCKS_BY_GROUP[:9],
            "last": FLAG,
            "timeout": [*SECONDS, 0],
        },
    )
    yield Case(
        "warm",
        cache.warm,
        {"engine_reference": cache.engine_reference},
        {"engine_reference": TEXT, "timeout": [*SECONDS, 0]},
    )
    yield Case("close", cache.close, {}, {"timeout": SECONDS})
    scheduler = SchedulerPort(client, EngineSpec(unique_id("ports"), (GROUP,)))
    ports.callback(scheduler.close)
    worker = WorkerPort(client, scheduler.spec)
    ports.callback(worker.close)
    worker.register({"l": array()}, axes=AXES)
    scheduler.acquire("mine", publication.reference)
    while (offer := scheduler.granted("mine")) is None:
        threading.Event().wait(0.01)
    grant = offer.attached((), None, timeout=30.0)
    yield Case(
        "SchedulerPort",
        SchedulerPort,
        {"client": client},
        {
            "spec": [None, 1],
        },
    )
    yield Case(
        "SchedulerPort options",
        SchedulerPort,
        {"client": client, "spec": scheduler.spec},
        {"hold_until_quiet": FLAG, "max_waiting": [*NOT_AN_INTEGER, *NEGATIVE, 0], "timeout": [*SECONDS, 0]},
    )
    yield Case(
        "WorkerPort",
        WorkerPort,
        {"client": client, "spec": scheduler.spec},
        {"client": [None, node], "spec": [None, 1], "rank": [*NUMBER, 1]},
    )
    yield Case("port publish", scheduler.publish, right_publish, wrong_publish)
    yield Case("port miss", scheduler.miss, right_miss, wrong_miss)
    yield Case(
        "port ask",
        scheduler.ask,
        {"request_id": "asked", **right_question},
        wrong_question | {"request_id": TEXT, "first_token": [*NUMBER, 3], "progressive": FLAG},
    )
    yield Case(
        "port publish_more",
        scheduler.publish_more,
        {"publication": more, "blocks": {"full": Blocks([2])}, "last": False},
        {"publication": publications, "blocks": BLOCKS_BY_GROUP, "last": FLAG, "payload": PAYLOAD, "prompt": PROMPT},
    )
    yield Case("port abort", scheduler.abort, {}, {"publication": publications})
    yield Case(
        "acquire",
        scheduler.acquire,
        {"request_id": "r", "reference": publication.reference},
        {
            "request_id": [*TEXT, "mine"],
            "reference": reference,
            "expected_reads": NUMBER,
            "timeout": [*SECONDS, 0],
            "prompt": PROMPT,
        },
    )
    yield Case("granted", scheduler.granted, {}, {"request_id": [*TEXT, "unknown"]})
    yield Case(
        "attach",
        scheduler.attach,
        {"request_id": "mine", "local_blocks": {"full": Blocks([1])}},
        {
            "request_id": [*TEXT, "unknown"],
            "local_blocks": [*BLOCKS_BY_GROUP, {}],
            "tokens": [*TOKEN_RANGE, (0, 17)],
            "allow_overlap": FLAG,
            "prompt": PROMPT,
        },
    )
    yield Case("port decline", scheduler.decline, {}, {"reference": reference})
    yield Case("cancel", scheduler.cancel, {}, {"request_id": TEXT})
    yield Case("collect", scheduler.collect, {}, {"output": [None, 1, {}, b"", WorkerOutput(1), WorkerOutput(-1)]})
    yield Case("port close", scheduler.close, {}, {"timeout": SECONDS})
    yield Case(
        "start",
        worker.start,
        {"grant": grant},
        {"grant": [None, 1, offer, {}], "tails": [None, "zero", 1]},
    )
    yield Case("worker cancel", worker.cancel, {}, {"read_id": TEXT})
    yield Case("acknowledge", worker.acknowledge, {}, {"output": [None, 1, {}]})
    yield Case(
        "worker warm",
        worker.warm,
        {"engine_reference": cache.engine_reference},
        {"engine_reference": TEXT, "timeout": [*SECONDS, 0]},
    )
    yield Case("register again", worker.register, {}, {"kv_caches": [{"l": array()}]})


def test_methods_refuse_wrong_arguments(cases: list[Case]) -> None:
    for case in cases:
        assert_refused(case)


def test_a_client_goes_on_after_wrong_arguments(node: str) -> None:
    """Every method of one engine with every wrong argument, and then a read that is right to the byte."""
    with Client(node) as client, ExitStack() as ports:
        for case in methods(node, client, ports):
            if not case.name.startswith(("close", "port close")):
                assert_refused(case)
        theirs, mine = array(), array()
        theirs[:] = 5
        source = client.register_cache(EngineSpec(unique_id("source"), (GROUP,)), tensors={"l": theirs}, axes=AXES)
        reader = client.register_cache(EngineSpec(unique_id("reader"), (GROUP,)), tensors={"l": mine}, axes=AXES)
        publication = source.session.publish("request", {"full": Blocks([3])})
        reader.read(publication.reference, {"full": Blocks([1])}).result(30)
        assert (mine[:, 1] == 5).all()
        assert mine.sum() == mine[:, 1].sum()


def assert_refused(case: Case) -> None:
    for field, values in case.wrong.items():
        for value in values:
            try:
                call = case.call(**{**case.right, field: value})
            except KvferryError as error:
                assert len(str(error)) < 1000, case.name  # noqa: PT017
                assert not error.retryable, (case.name, field, error)  # noqa: PT017
            except Exception as error:
                raise AssertionError(f"{case.name}({field}={value!r:.80}) raised {error!r:.300}") from error
            else:
                raise AssertionError(f"{case.name}({field}={value!r:.80}) gave {call!r:.200}")


def test_every_public_class_is_listed_here() -> None:
    """What is exported and can be made of arguments is in the tables."""
    covered = {case.name.split()[0].split(".")[0] for case in CONSTRUCTORS} | {
        *("Client", "Cache", "EngineSession", "SchedulerPort", "WorkerPort")
    }
    values = {"ReadResult", "ReadSummary", "ReadProgress", "Publication", "Release", "Verification", "ReadPlan", "Read"}
    values |= {"Question"}
    # The settings of `serve` are a TypedDict, and checked by the server.
    waived = {"Listed", "AsyncClient", "TlsConfig", "Costs", "PathRule", "EmbeddedServer", "ServerSettings"}
    exported = {name for name in kvferry.__all__ if inspect.isclass(getattr(kvferry, name))}
    enums = {"GroupKind", "MemoryKind", "MissReason", "ReadState", "ReleaseOutcome", "KvferryError"}
    assert exported - covered - values - waived - enums == set()
    assert inspect.isclass(Grant)


def test_an_option_of_a_client_that_is_no_choice_is_refused_with_the_choices() -> None:
    for wrong in ("later", "", None, 1):
        with pytest.raises(InvalidField, match=r"prompt_check is .*, expected 'require', 'compare' or 'off'"):
            Client("unix:/nowhere", prompt_check=cast(str, wrong))
