"""The problems at the head of the page: which there are, in which order, with missing ranks and the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry_server.admin.page import (
    COMES_BACK,
    EXPIRED,
    FAILED,
    LOOK,
    MAX_ENGINES,
    NEVER_CAME,
    RANKS_ABSENT,
    RANKS_GONE,
    Problem,
    problems,
)
from kvferry_server.domain.journal import LAST_READS, RECENT
from kvferry_server.domain.values import EngineRef, RankOutcome, RankReport
from tests.support.parties import SECRETS, D, E, P, Scene, rank_geometry, registration


def node(scene: Scene, ready: str = "", healthy: str = "") -> Any:
    """A node server whose home has these records."""
    home = SimpleNamespace(clock=scene.clock, records=scene.records, journal=scene.records.journal)
    return SimpleNamespace(
        home=home,
        engines=scene.registry.all_engines(),
        why_not_ready=lambda: ready,
        why_not_healthy=lambda: healthy,
    )


def found(scene: Scene) -> list[Problem]:
    return list(problems(node(scene), recovering=False)[0])


def registered(scene: Scene, engine: EngineRef, *ranks: int, of: int) -> None:
    for rank in ranks:
        scene.registry.register(registration(engine, rank, of), SECRETS[engine])


def test_node_server_comes_first() -> None:
    scene = Scene()
    (first, second, third, engine), _ = problems(node(scene, "draining", "timers stopped"), recovering=True)
    assert [each.state for each in (first, second, third)] == ["ill", "unready", "recovering"]
    assert "timers stopped" in first.what
    assert "draining" in second.what
    assert engine == Problem("incomplete", f"'{P.engine_id}': no rank has registered", RANKS_ABSENT)


def test_engines_that_work_are_no_problem() -> None:
    scene = Scene()
    registered(scene, P, 0, 1, of=2)
    assert found(scene) == []


def test_ranks_that_are_missing_are_named() -> None:
    scene = Scene()
    registered(scene, P, 0, 3, of=8)
    what = "6 of 8 ranks are missing; not registered: ranks 1-2, 4-7"
    assert found(scene) == [Problem("incomplete", f"'{P.engine_id}': {what}", RANKS_ABSENT)]


def test_ranks_that_are_gone_are_named_with_lost_nodes() -> None:
    scene = Scene()
    registered(scene, P, 0, 1, of=3)
    for rank, address in ((0, ""), (1, "node-7:7423")):
        scene.registry.open_rank(P, SECRETS[P], rank, address)
        scene.registry.close_rank(P, rank)
    scene.wait(scene.times.engine_ttl)
    (problem,) = found(scene)
    what = "3 of 3 ranks are missing; gone: ranks 0-1; not registered: rank 2; lost nodes: node-7:7423"
    assert problem.what == f"'{P.engine_id}': {what}"
    assert problem.next_step == RANKS_GONE


def test_most_ranks_are_only_counted() -> None:
    scene = Scene()
    scene.registry.register(registration(P, 0, 1000, geometry=rank_geometry()), SECRETS[P])
    what = "999 of 1000 ranks are missing; not registered: ranks 1-64; and 935 more"
    assert found(scene)[0].what == f"'{P.engine_id}': {what}"


def test_dead_engines_come_before_lost_ones() -> None:
    scene = Scene()
    scene.open(D)
    scene.open(E)
    registered(scene, D, 0, of=1)
    scene.registry.close_engine(E)
    scene.wait(8.0)
    scene.registry.close_engine(P)
    scene.wait(4.0)
    dead, lost = found(scene)
    assert dead.state == "dead"
    assert f"'{E.engine_id}': its scheduler has been away for 12 s" in dead.what
    assert dead.next_step == LOOK
    assert (lost.state, lost.next_step) == ("lost", COMES_BACK)
    assert lost.what == f"'{P.engine_id}': its scheduler has been away for 4.0 s; it counts as dead after 10 s"


def test_most_engines_are_only_counted() -> None:
    shown = node(Scene())
    shown.engines = list(shown.engines) * (MAX_ENGINES + 7)
    described, left = problems(shown, recovering=False)
    assert (len(described), left) == (MAX_ENGINES, 7)


def test_reads_that_ended_badly_are_summed_up_and_forgotten() -> None:
    scene = Scene()
    registered(scene, P, 0, of=1)
    scene.publish(1)
    for name in ("one", "two"):
        lease = scene.grant(1, D, name)
        report = RankReport(0, RankOutcome.FAILED, reason="TRANSFER_STUCK")
        scene.lessor.report(lease.lease_id, D, [report])
        scene.wait(1.0)
    scene.grant(1, E)
    scene.wait(scene.times.ttl + 1)
    expired, failed = found(scene)
    assert expired == Problem("expired", f"'{E.engine_id}' from '{P.engine_id}': a read, 1.0 s ago", EXPIRED)
    what = f"'{D.engine_id}' from '{P.engine_id}': 2 reads, the last 32 s ago, TRANSFER_STUCK"
    assert failed == Problem("failed", what, FAILED)
    scene.publish(2)
    good = scene.grant(2, D)
    scene.report(good, 0)
    scene.wait(RECENT)
    assert found(scene) == []


def fail(scene: Scene, number: int, reader: EngineRef = D) -> None:
    lease = scene.grant(number, reader, f"{number}")
    scene.lessor.report(lease.lease_id, reader, [RankReport(0, RankOutcome.FAILED, reason="TRANSFER_STUCK")])


def test_reads_that_ended_badly_stay_on_the_page_of_a_busy_home() -> None:
    """It forgets its last reads within a moment, and one reader that fails all the time hides no other."""
    scene = Scene()
    registered(scene, P, 0, of=1)
    scene.publish(1)
    fail(scene, 1, E)
    for number in range(2, LAST_READS + 12):
        scene.publish(number)
        fail(scene, number)
        scene.report(scene.grant(number), 0)
    assert [problem.what.partition(":")[0] for problem in found(scene)] == [
        f"'{reader.engine_id}' from '{P.engine_id}'" for reader in (D, E)
    ]
    assert f": {LAST_READS + 10} reads, the last 0.0 s ago" in found(scene)[0].what
    scene.wait(RECENT)
    scene.publish(1000)
    fail(scene, 1000)
    assert [": a read, 0.0 s ago" in problem.what for problem in found(scene)] == [True]


def test_kinds_of_bad_ends_are_bounded() -> None:
    """A caller may use any number of names."""
    scene = Scene()
    registered(scene, P, 0, of=1)
    scene.publish(1)
    for number in range(LAST_READS + 10):
        fail(scene, 1, EngineRef(f"reader-{number}", b"i" * 16))
    assert len(found(scene)) == LAST_READS
    assert f"'reader-{LAST_READS + 9}'" in found(scene)[0].what


def test_names_in_a_problem_cannot_look_like_its_words() -> None:
    scene = Scene()
    registered(scene, P, 0, of=1)
    scene.publish(1)
    fail(scene, 1, EngineRef("x' from 'other': 9 reads, the last 1.0 s ago", b"i" * 16))
    assert found(scene)[0].what.startswith("\"x' from 'other': 9 reads, the last 1.0 s ago\" from")


def test_reader_that_waits_in_vain_is_not_to_blame() -> None:
    scene = Scene()
    registered(scene, P, 0, of=1)
    gone, waiting = scene.grant(7, E), scene.grant(8, D)
    for _ in range(round(scene.times.max_wait / 10)):
        scene.wait(10.0)
        scene.renew(waiting)
    assert not gone.live
    assert not waiting.live
    assert [(problem.state, problem.next_step) for problem in found(scene)] == [
        ("expired", NEVER_CAME),
        ("expired", EXPIRED),
    ]
