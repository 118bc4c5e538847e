"""PROTOCOL, Identities; Watch, liveness: engines, their ends, and the registrations of their ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import tracemalloc
from collections.abc import Callable

import pytest

from kvferry._wire.authority import incarnation_of
from kvferry.errors import (
    BadAgentMetadata,
    BadGeometry,
    CacheDiffers,
    EngineIdInUse,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    LimitReached,
    PeerRestarted,
    WrongSession,
)
from kvferry.geometry.model import AgentInfo, RankGeometry
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Event, Feed, Process, Role
from kvferry_server.domain.lessor import Lessor
from kvferry_server.domain.limits import MAX_NAMED_RANKS, MAX_REGION_CHECKS, Limits
from kvferry_server.domain.records import Records
from kvferry_server.domain.registrations import REGISTRATION_BYTES, Registration
from kvferry_server.domain.registry import Registry
from kvferry_server.domain.sources import Sources
from kvferry_server.domain.values import EngineRef, RevokeReason
from tests.support.parties import (
    BASE,
    FULL,
    P2,
    SECRETS,
    STATE,
    TIMES,
    WINDOW,
    FakeClock,
    P,
    agent_of,
    ask,
    offer,
    rank_geometry,
    registration,
    start,
)

P3 = start("prefill", "R")


class Scene:
    """A registry that has been up for long."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.clock = FakeClock()
        self.records = Records(self.clock, TIMES, limits or Limits())
        self.registry = Registry(self.records)
        self.feed = Feed(Process(P, Role.SCHEDULER), kept=100)
        self.clock.pass_by(1000)

    def open(self, ref: EngineRef = P) -> bytes:
        engine = self.registry.open_engine(ref, SECRETS[ref])
        if ref == P:
            engine.feeds[self.feed.process] = self.feed
        return SECRETS[ref]

    def wait(self, seconds: float) -> list[Event]:
        """Return the events meanwhile for the scheduler of `P`."""
        seen = self.feed.sequence
        self.clock.pass_by(seconds)
        self.records.advance()
        return [event for _, event in self.feed.after(seen)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("known", [False, True])
def test_session_secret_of_an_incarnation_is_needed_for_its_first_watch_too(scene: Scene, known: bool) -> None:
    if known:
        scene.open()
    own = SECRETS[P]
    for wrong in (b"", b"s" * 32, own[:-1], own + b"x", SECRETS[P2], P.incarnation):
        calls: tuple[Callable[[], object], ...] = (
            lambda wrong=wrong: scene.registry.open_engine(P, wrong),  # type: ignore[misc]
            lambda wrong=wrong: scene.registry.check_session(P, wrong),  # type: ignore[misc]
            lambda wrong=wrong: scene.registry.open_rank(P, wrong, 0),  # type: ignore[misc]
            lambda wrong=wrong: scene.registry.register(registration(), wrong),  # type: ignore[misc]
        )
        for call in calls:
            with pytest.raises(WrongSession):
                call()
    scene.open()
    assert scene.registry.check_session(P, own).ref == P


def test_incarnation_is_refused_while_another_is_watched_or_within_its_ttl(scene: Scene) -> None:
    scene.open()
    with pytest.raises(EngineIdInUse) as caught:
        scene.open(P2)
    assert "registers with its token (token=...)" in str(caught.value)
    assert caught.value.retry_after == TIMES.engine_ttl
    engine = scene.registry.find(P)
    scene.registry.close_engine(P)
    scene.wait(4)
    with pytest.raises(EngineIdInUse) as caught:
        scene.open(P2)
    assert caught.value.retry_after == TIMES.engine_ttl - 4
    assert caught.value.values["incarnation"] == P.incarnation.hex()
    assert not engine.dead
    scene.wait(TIMES.engine_ttl - 4)
    assert engine.dead
    assert not engine.gone
    scene.open(P2)
    assert engine.gone


def test_a_thousand_engines_lost_at_once_die_together(scene: Scene) -> None:
    """As when a network is cut."""
    refs = {}
    for number in range(1000):
        secret = hashlib.sha256(b"%d" % number).digest()
        ref = EngineRef(f"engine-{number}", incarnation_of(secret))
        refs[ref] = scene.registry.open_engine(ref, secret)
        Sources(scene.records).abort(ref, 1)
    for ref in refs:
        scene.registry.close_engine(ref)
    scene.clock.pass_by(TIMES.engine_ttl)
    while scene.records.deadlines.next_deadline() <= scene.clock.now():
        scene.records.advance()
    assert all(engine.dead for engine in refs.values())
    scene.clock.pass_by(TIMES.retire)
    while scene.records.deadlines.next_deadline() <= scene.clock.now():
        scene.records.advance()
    assert not scene.records.engines


def test_replaced_incarnation_is_refused_and_cannot_evict_the_live_one(scene: Scene) -> None:
    secret = scene.open()
    scene.registry.close_engine(P)
    scene.wait(TIMES.engine_ttl)
    scene.open(P2)
    calls: tuple[Callable[[], object], ...] = (
        lambda: scene.registry.open_engine(P, SECRETS[P]),
        lambda: scene.registry.check_session(P, secret),
        lambda: scene.registry.register(registration(), secret),
        lambda: scene.registry.find_live(P.engine_id, P.incarnation),
    )
    for call in calls:
        with pytest.raises(PeerRestarted) as caught:
            call()
        assert caught.value.values["current"] == P2.incarnation.hex()
    # Also after the death of its successor.
    scene.registry.close_engine(P2)
    scene.wait(TIMES.engine_ttl)
    with pytest.raises(PeerRestarted):
        scene.open(P)
    scene.open(P3)


def test_refusal_of_a_retired_incarnation_ends(scene: Scene) -> None:
    scene.open()
    scene.registry.close_engine(P)
    scene.wait(TIMES.engine_ttl)
    scene.open(P2)
    scene.registry.close_engine(P2)
    scene.wait(TIMES.retire)
    scene.open(P)


def test_watch_that_is_back_in_time_changes_nothing(scene: Scene) -> None:
    scene.open()
    scene.registry.close_engine(P)
    scene.wait(TIMES.engine_ttl - 1)
    engine = scene.registry.open_engine(P, SECRETS[P])
    scene.wait(100)
    assert engine.watched
    assert not engine.dead


def test_a_dead_engine_may_come_back_until_it_is_replaced_or_forgotten(scene: Scene) -> None:
    secret = scene.open()
    scene.registry.register(registration(), secret)
    scene.registry.close_engine(P)
    scene.wait(TIMES.engine_ttl)
    with pytest.raises(EngineUnknown):
        scene.registry.find_live(P.engine_id)
    with pytest.raises(EngineIncomplete):
        scene.registry.check_session(P, secret)
    assert not list(scene.registry.engines())
    engine = scene.registry.open_engine(P, SECRETS[P])
    engine.check_readable()
    scene.registry.close_engine(P)
    scene.wait(TIMES.engine_ttl)
    assert engine.dead
    scene.wait(TIMES.retire - 1)
    assert not engine.gone
    scene.wait(1)
    assert engine.gone
    with pytest.raises(EngineUnknown):
        scene.registry.find(P)


def test_unknown_engine_is_awaited_at_a_new_home() -> None:
    clock = FakeClock()
    registry = Registry(Records(clock, TIMES, Limits()))
    with pytest.raises(HomeRecovering):
        registry.find(P)
    with pytest.raises(HomeRecovering):
        registry.check_session(P, SECRETS[P])
    clock.pass_by(TIMES.engine_ttl)
    with pytest.raises(EngineUnknown):
        registry.find(P)


def test_engines_are_limited() -> None:
    scene = Scene(Limits(engines=1))
    scene.open()
    with pytest.raises(LimitReached):
        scene.open(start("another", "A"))


# Ranks.


def test_an_engine_is_readable_once_all_ranks_are_in(scene: Scene) -> None:
    secret = scene.open()
    engine = scene.registry.find(P)
    with pytest.raises(EngineIncomplete):
        engine.check_readable()
    for rank in (2, 0):
        scene.registry.register(registration(rank=rank, ranks=4), secret)
    with pytest.raises(EngineIncomplete) as caught:
        engine.check_readable()
    assert caught.value.values["missing_ranks"] == "1,3"
    for rank in (1, 3):
        scene.registry.register(registration(rank=rank, ranks=4), secret)
    engine.check_readable()
    assert [rank for rank, _ in engine.check_readable().ranks()] == [0, 1, 2, 3]
    scene.registry.close_engine(P)
    with pytest.raises(EngineIncomplete):
        engine.check_readable()


def test_registration_of_the_same_content_changes_nothing(scene: Scene) -> None:
    secret = scene.open()
    first = scene.registry.register(registration(), secret)
    description = first.description
    assert scene.registry.register(registration(), secret).description is description


def _with_plane(**changes: object) -> Callable[[Registration], Registration]:
    def change(given: Registration) -> Registration:
        planes = (dataclasses.replace(given.geometry.planes[0], **changes), *given.geometry.planes[1:])  # type: ignore[arg-type]
        return dataclasses.replace(given, geometry=dataclasses.replace(given.geometry, planes=planes))

    return change


def _with_other_base(given: Registration) -> Registration:
    geometry = rank_geometry(0, 2, base=2 * BASE)
    assert given.agent is not None
    return dataclasses.replace(given, geometry=geometry, agent=agent_of(geometry, given.agent.name))


def _with_agent(name: str) -> Callable[[Registration], Registration]:
    return lambda given: dataclasses.replace(given, agent=agent_of(given.geometry, name))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_ranks", lambda given: dataclasses.replace(given, num_ranks=3)),
        ("identity[model]", lambda given: dataclasses.replace(given, identity={"model": "other"})),
        ("identity[rope]", lambda given: dataclasses.replace(given, identity={"model": "m", "rope": "x"})),
        (
            "groups",
            lambda given: dataclasses.replace(given, groups=(*given.groups, dataclasses.replace(FULL, name="x"))),
        ),
        (
            "groups[full].null_block",
            lambda given: dataclasses.replace(given, groups=(dataclasses.replace(FULL, null_block=1),)),
        ),
        (
            "rank.labels[tp_rank]",
            lambda given: dataclasses.replace(given, geometry=dataclasses.replace(given.geometry, labels={})),
        ),
        (
            "rank.planes",
            lambda given: dataclasses.replace(
                given, geometry=dataclasses.replace(given.geometry, planes=given.geometry.planes[:1])
            ),
        ),
        ("rank.planes[layers.0/key].dtype", _with_plane(dtype="float16")),
        ("rank.planes[layers.0/key].base", _with_other_base),
        ("agent.name", _with_agent("another")),
        ("agent", lambda given: dataclasses.replace(given, agent=None)),
    ],
)
def test_registration_of_other_content_names_the_field_that_differs(
    scene: Scene, field: str, change: Callable[[Registration], Registration]
) -> None:
    secret = scene.open()
    given = registration(ranks=2)
    scene.registry.register(given, secret)
    with pytest.raises(CacheDiffers) as caught:
        scene.registry.register(change(given), secret)
    assert caught.value.values["field"] == field
    assert scene.registry.find(P).ranks[0] == given


def test_ranks_agree_about_their_engine(scene: Scene) -> None:
    secret = scene.open()
    scene.registry.register(registration(ranks=2), secret)
    for wrong, field in (
        (registration(rank=1, ranks=3), "num_ranks"),
        (registration(rank=1, ranks=2, identity={"model": "other"}), "identity[model]"),
        (registration(rank=1, ranks=2, groups=(dataclasses.replace(FULL, pool="p"),)), "groups[full].pool"),
    ):
        with pytest.raises(CacheDiffers) as caught:
            scene.registry.register(wrong, secret)
        assert caught.value.values["field"] == field


def test_agents_of_an_engine_have_names_of_their_own(scene: Scene) -> None:
    secret = scene.open()
    first, second = registration(ranks=2), registration(rank=1, ranks=2)
    scene.registry.register(first, secret)
    assert first.agent is not None
    with pytest.raises(InvalidField):
        scene.registry.register(_with_agent(first.agent.name)(second), secret)


def test_a_registration_that_contradicts_itself_cannot_be_made() -> None:
    given = registration()
    assert given.agent is not None
    with pytest.raises(BadAgentMetadata):
        dataclasses.replace(given, agent=dataclasses.replace(given.agent, metadata=b"damaged"))
    with pytest.raises(BadGeometry):
        dataclasses.replace(given, agent=dataclasses.replace(given.agent, regions=()))
    with pytest.raises(BadGeometry):
        dataclasses.replace(given, groups=())
    with pytest.raises(BadGeometry):
        dataclasses.replace(given, groups=(FULL, FULL))
    with pytest.raises(InvalidField):
        dataclasses.replace(registration(rank=1, ranks=2), num_ranks=1)
    many = given.agent.regions * (MAX_REGION_CHECKS // len(given.geometry.planes) + 1)
    with pytest.raises(InvalidField):
        dataclasses.replace(given, agent=dataclasses.replace(given.agent, regions=many))


def test_ranks_of_an_engine_are_limited() -> None:
    scene = Scene(Limits(ranks=8))
    secret = scene.open()
    with pytest.raises(InvalidField):
        scene.registry.register(dataclasses.replace(registration(), num_ranks=9), secret)


def test_a_rank_whose_watch_is_lost_makes_the_engine_unreadable(scene: Scene) -> None:
    secret = scene.open()
    engine = scene.registry.open_rank(P, secret, 1)
    for rank in range(2):
        scene.registry.register(registration(rank=rank, ranks=2), secret)
    scene.registry.close_rank(P, 1)
    assert scene.wait(TIMES.engine_ttl - 1) == []
    engine.check_readable()
    assert scene.wait(1) == [pb.RankLost(rank=1, node="", node_lost=False)]
    with pytest.raises(EngineIncomplete) as caught:
        engine.check_readable()
    assert caught.value.values["missing_ranks"] == "1"
    # Another process with the same token is not the rank that died: it has other memory.
    with pytest.raises(CacheDiffers):
        scene.registry.register(_with_agent("another")(registration(rank=1, ranks=2)), secret)
    scene.registry.register(registration(rank=1, ranks=2), secret)
    engine.check_readable()
    # Without a Watch the rank ends after one ttl.
    assert scene.wait(TIMES.engine_ttl) == [pb.RankLost(rank=1, node="", node_lost=False)]


def test_a_rank_that_comes_back_in_time_is_not_lost(scene: Scene) -> None:
    secret = scene.open()
    scene.registry.open_rank(P, secret, 0)
    scene.registry.register(registration(), secret)
    scene.registry.close_rank(P, 0)
    scene.wait(TIMES.engine_ttl - 1)
    scene.registry.open_rank(P, secret, 0)
    assert scene.wait(100) == []


def test_watch_of_a_rank_that_the_engine_lacks_is_refused(scene: Scene) -> None:
    secret = scene.open()
    with pytest.raises(InvalidField):
        scene.registry.open_rank(P, secret, Limits().ranks)
    scene.registry.register(registration(ranks=2), secret)
    with pytest.raises(InvalidField):
        scene.registry.open_rank(P, secret, 2)


def test_refused_incarnation_retires_no_other() -> None:
    clock = FakeClock()
    records = Records(clock, TIMES, Limits())
    registry = Registry(records)
    # In a new home both incarnations live; then one of them is lost for long.
    for ref in (P, P2):
        registry.open_engine(ref, SECRETS[ref])
    registry.close_engine(P)
    clock.pass_by(TIMES.engine_ttl + 1)
    records.advance()
    with pytest.raises(EngineIdInUse):
        registry.open_engine(P3, SECRETS[P3])
    assert registry.open_engine(P, SECRETS[P]).ref == P


def test_a_successor_takes_the_place_of_its_predecessor_in_a_full_home() -> None:
    clock = FakeClock()
    registry = Registry(Records(clock, TIMES, Limits(engines=4)))
    clock.pass_by(1000)
    other = start("other", "o")
    for ref in (P, other):
        registry.open_engine(ref, SECRETS[ref], "192.0.2.1")
    registry.close_engine(P)
    clock.pass_by(TIMES.engine_ttl + 1)
    for letter in "xy":
        ref = start(letter, letter)
        registry.open_engine(ref, SECRETS[ref], f"192.0.2.{ord(letter)}")
    stranger = start("z", "z")
    with pytest.raises(LimitReached):
        registry.open_engine(stranger, SECRETS[stranger], "192.0.2.9")
    assert registry.open_engine(P2, SECRETS[P2], "192.0.2.1").ref == P2


def test_nodes_of_missing_ranks_are_named_and_so_are_lost_nodes(scene: Scene) -> None:
    secret = scene.open()
    engine = scene.registry.find(P)
    for rank, node in ((1, "one:1"), (2, "two:1"), (3, "")):
        scene.registry.open_rank(P, secret, rank, node)
    for rank in (0, 1, 2, 3):
        scene.registry.register(registration(rank=rank, ranks=5), secret)
    # A rank that never registered has no node.
    with pytest.raises(EngineIncomplete) as caught:
        engine.check_readable()
    assert (caught.value.values["missing_ranks"], caught.value.values["missing"]) == ("4", "1")
    assert not {"nodes", "lost_nodes"} & set(caught.value.values)
    # The node server of the second rank reports its end, so that node is alive.
    scene.registry.rank_left(P, 2)
    scene.registry.rank_left(P, 2)
    for own in (0, 3, 4):
        with pytest.raises(InvalidField, match="another node server relays"):
            scene.registry.rank_left(P, own)
    for rank in (1, 2, 3):
        scene.registry.close_rank(P, rank)
    died = [
        pb.RankLost(rank=1, node="one:1", node_lost=True),
        pb.RankLost(rank=2, node="two:1", node_lost=False),
        pb.RankLost(rank=3, node="", node_lost=False),
    ]
    assert scene.wait(TIMES.engine_ttl) == died
    with pytest.raises(EngineIncomplete, match=r"nodes: one:1, two:1; nodes lost: one:1$") as caught:
        engine.check_readable()
    values = caught.value.values
    assert (values["missing_ranks"], values["missing"]) == ("1,2,3,4", "4")
    assert (values["nodes"], values["lost_nodes"]) == ("one:1,two:1", "one:1")
    # A rank that is back has neither its old node nor the report of its end.
    scene.registry.open_rank(P, secret, 2, "two:1")
    scene.registry.open_rank(P, secret, 1)
    for rank in (1, 2):
        scene.registry.register(registration(rank=rank, ranks=5), secret)
        scene.registry.close_rank(P, rank)
    assert scene.wait(TIMES.engine_ttl) == [
        pb.RankLost(rank=1, node="", node_lost=False),
        pb.RankLost(rank=2, node="two:1", node_lost=True),
    ]


@pytest.mark.parametrize(("missing", "ending"), [(MAX_NAMED_RANKS, "63, 64"), (MAX_NAMED_RANKS + 1, "63, 64 ...")])
def test_missing_ranks_are_named_up_to_a_limit(scene: Scene, missing: int, ending: str) -> None:
    secret = scene.open()
    engine = scene.registry.register(registration(ranks=missing + 1, geometry=rank_geometry()), secret)
    with pytest.raises(EngineIncomplete) as caught:
        engine.check_readable()
    assert str(caught.value).endswith(ending)
    assert caught.value.values["missing"] == str(missing)
    assert caught.value.values["missing_ranks"] == ",".join(map(str, range(1, 65)))


GROWS = ["planes", "names", "groups", "pools", "identity", "regions", "metadata", "labels", "texts"]


@pytest.mark.parametrize("grows", GROWS)
def test_registration_is_accounted_with_about_the_memory_it_uses(grows: str) -> None:
    def made(count: int) -> Registration:
        """A registration with about this much of one thing, sharing no objects."""
        given = registration()
        planes, agent = given.geometry.planes, given.agent
        assert agent is not None
        at = {grows: count}
        long = "x" * 200 if grows == "names" else ""
        more = tuple(
            dataclasses.replace(planes[0], layer=f"{long}{n}", format=f"{long}{n}", dtype=f"d{n}", shared=True)
            for n in range(at.get("planes", at.get("names", 5)))
        )
        labels = {f"{n:0500}": n for n in range(at.get("labels", 0))}
        geometry = dataclasses.replace(given.geometry, planes=more, labels=labels)
        region = agent.regions[0]
        agent = AgentInfo(
            agent.name,
            b"m" * at.get("metadata", 1),
            hashlib.sha256(b"m" * at.get("metadata", 1)).digest(),
            tuple(dataclasses.replace(region, length=region.length + n) for n in range(at.get("regions", 1))),
        )
        pool = "p" * 500 if grows == "pools" else "p"
        count = at.get("groups", at.get("pools", 1))
        others = (dataclasses.replace(FULL, name=f"group {n}", pool=f"{pool}{n}") for n in range(count))
        # One character that is far from ASCII makes all of its text large.
        filling = "\N{PILE OF POO}" if grows == "texts" else "x"
        count = at.get("identity", at.get("texts", 1))
        identity = {f"key {n}": f"{n}{filling}".rjust(500) for n in range(count)}
        return Registration(P, 1, identity, (FULL, *others), geometry, agent)

    less = made(10)
    tracemalloc.start()
    try:
        more = made(500)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 1.2 * (more.size - less.size + REGISTRATION_BYTES)
    assert more.size - less.size <= 4 * taken


def test_cache_bytes_of_an_engine_count_each_rank_once(scene: Scene) -> None:
    secret = scene.open()
    first, second = registration(ranks=2), registration(rank=1, ranks=2)
    # Key and value of two layers, 4 heads of 16 tokens each.
    assert first.cache_bytes == 4 * 4 * 16 * 256 * FULL.num_blocks
    for given in (first, second, first):
        scene.registry.register(given, secret)
    assert scene.registry.find(P).cache_bytes == 2 * first.cache_bytes


@pytest.mark.parametrize(("pool", "caches"), [("device", 1), ("", 2)])
def test_cache_bytes_count_memory_that_groups_of_a_pool_share_once(pool: str, caches: int) -> None:
    """So a cache that is pinned as a whole is pinned to 100 %, however many groups share it."""
    groups = (STATE, *(dataclasses.replace(group, pool=pool) for group in (FULL, WINDOW)))
    planes = rank_geometry().planes
    more = rank_geometry(base=BASE if pool else 2 * BASE + planes[-1].extent[1]).planes
    of_window = (dataclasses.replace(plane, group="window", layer=f"w.{plane.layer}") for plane in more)
    given = registration(geometry=RankGeometry(0, (*planes, *of_window)), groups=groups)
    assert given.cache_bytes == caches * registration().cache_bytes


def test_regions_of_a_registration_are_limited_by_the_cost_of_their_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_server.domain.registrations.MAX_REGION_CHECKS", 12)
    given = registration()
    agent = given.agent
    assert agent is not None
    assert len(given.geometry.planes) == 4

    def regions(count: int) -> Registration:
        return dataclasses.replace(given, agent=dataclasses.replace(agent, regions=agent.regions * count))

    assert regions(3).rank == 0
    with pytest.raises(InvalidField, match="at most 3 for 4 planes"):
        regions(4)


def test_an_engine_that_retires_leaves_its_name_and_is_refused(scene: Scene) -> None:
    secret = scene.open()
    scene.registry.register(registration(), secret)
    sources, engine = Sources(scene.records), scene.registry.find(P)
    sources.begin_snapshot(P)
    sources.publish(P, offer())
    sources.end_snapshot(P, 1)
    lease = Lessor(scene.records).grant(ask())
    scene.registry.retire(P)
    assert engine.gone
    assert not engine.ranks  # Their memory is given back, whatever lease is live.
    assert lease.live
    assert lease.revoked is RevokeReason.ABORTED
    scene.open(P2)
    with pytest.raises(PeerRestarted) as caught:
        scene.registry.retire(P)
    assert caught.value.values["current"] == P2.incarnation.hex()
    # The Watch ends after `retire`.
    scene.registry.close_engine(P)
    with pytest.raises(PeerRestarted):
        scene.open(P)
    assert scene.wait(TIMES.engine_ttl) == []
    assert scene.registry.find_live(P.engine_id).ref == P2


def test_refused_incarnations_are_limited_and_the_oldest_of_the_host_with_the_most_are_forgotten_first() -> None:
    scene = Scene(Limits(retired=4))
    secrets = [letter.encode() * 32 for letter in "abcdef"]
    refs = [EngineRef("storm", incarnation_of(secret)) for secret in secrets]
    own = scene.open()
    scene.registry.retire(P)
    for ref, secret in zip(refs, secrets, strict=True):
        scene.registry.open_engine(ref, secret, "10.0.0.1")
        scene.registry.retire(ref)
    for ref, secret in zip([P, *refs[3:]], [own, *secrets[3:]], strict=True):
        with pytest.raises(PeerRestarted):
            scene.registry.open_engine(ref, secret)
    scene.registry.open_engine(refs[0], secrets[0])
