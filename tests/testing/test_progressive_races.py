"""Progressive reads beside what else may happen: looks at a growing offer, a sibling that fails, cancels at any moment,
and the end of a port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks
from kvferry._session import home_session_of
from kvferry.engine import GrantStep
from kvferry.errors import NotPublished, TransferCancelled, Unreachable
from kvferry.geometry import blocks as blocks_module
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import BLOCK, SOON, Engine, kv
from tests.testing.stepping_engines import THEIRS, TOKENS, VALUES, Decode, Prefill, begin, halfway


def test_an_engine_that_looks_at_its_grant_again_takes_no_step_from_its_workers(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    decode.worker.start(decode.attached(prefill))
    for tokens in (8, TOKENS):
        prefill.compute(tokens)
    until(lambda: decode.scheduler._reads._by_request["mine"].complete)
    assert decode.scheduler.granted("mine") is not None
    while not decode.ended:
        decode.step()
        for step in decode.steps:
            decode.worker.add_step(step)
    assert decode.ended[0].error is None
    assert decode.holds(TOKENS)


def test_an_offer_grows_by_what_is_new_however_long_it_waits(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 60
    prefill, decode = Engine(fabric, "p", blocks=2 * count), Decode(fabric)
    publication = prefill.session.publish("request", {"full": Blocks([0])}, last=False)
    decode.scheduler.acquire("mine", publication.reference, progressive=True)
    until(lambda: decode.scheduler.granted("mine") is not None)

    def offered() -> int | None:
        """Up to which token."""
        offer = decode.scheduler.granted("mine")
        return None if offer is None else offer.granted[0].end_token

    handled = 0
    checked = blocks_module._checked_ids

    def counted(ids: object) -> object:
        nonlocal handled
        found = checked(ids)  # type: ignore[arg-type]
        handled += len(found)
        return found

    monkeypatch.setattr(blocks_module, "_checked_ids", counted)
    for place in range(1, count):
        some = {"full": Blocks([2 * place], BLOCK * place)}
        prefill.session.publish_more(publication, some, last=place == count - 1)
        until(partial(lambda end: offered() == end, BLOCK * (place + 1)))
    # Each block a few times, on both sides; never all that came before it.
    assert handled < 10 * count
    offer = decode.scheduler.granted("mine")
    assert offer is not None
    assert offer.complete
    assert offer.blocks() == {"full": Blocks(list(range(0, 2 * count, 2)), 0, BLOCK * count)}


def test_a_read_that_fails_harms_no_other_read_of_the_same_source_between_its_steps(fabric: Fabric) -> None:
    prefill, decode, read = halfway(fabric)
    other = prefill.publish(kv(8, seed=2), [20, 21], "other")
    fabric.fail_reads()
    (failing,) = decode.read(other.reference, [20, 21])
    assert failing.exception(SOON) is not None
    prefill.compute(TOKENS)
    assert read.result(SOON).bytes == VALUES.nbytes
    (again,) = decode.read(other.reference, [20, 21])
    assert again.exception(SOON) is None


def test_a_grant_that_is_declined_halfway_releases_its_source(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    decode.scheduler.acquire("mine", prefill.reference, progressive=True)
    decode.until(lambda: decode.scheduler.granted("mine"))
    decode.scheduler.decline(prefill.reference)
    assert prefill.outcome(prefill.publication).name == "DECLINED"


def test_a_read_closed_halfway_is_quiet_and_its_source_is_free(fabric: Fabric) -> None:
    prefill, decode, read = halfway(fabric)
    decode.caches[0].close()
    assert isinstance(read.exception(SOON), TransferCancelled)
    assert read.quiet
    prefill.session.abort(prefill.publication)
    assert prefill.outcome(prefill.publication).name == "ABORTED"


def test_a_cancelled_read_writes_nothing_once_it_is_quiet(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    random = np.random.default_rng(7)
    prefill.write(VALUES, THEIRS)
    for attempt in range(60):
        publication = prefill.session.publish(f"request {attempt}", {}, last=False)
        (read,) = begin(decode, publication)  # type: ignore[arg-type]
        last = int(random.integers(1, 6))
        for place in range(last):
            some = {"full": Blocks(THEIRS[place : place + 1], BLOCK * place)}
            prefill.session.publish_more(publication, some, last=False)
        for _ in range(int(random.integers(0, 2000))):
            pass
        if not read.cancel():
            assert read.wait_quiet(SOON)
        decode.memory[0][:] = 0
        read.exception(SOON)
        prefill.session.abort(publication)
        prefill.outcome(publication)
        assert not decode.memory[0].any(), attempt


def test_a_step_behind_one_that_is_given_up_is_not_answered_as_published(fabric: Fabric) -> None:
    engine = Engine(fabric, "p", blocks=3)
    steps = [{"full": Blocks([block], first_token=block * BLOCK)} for block in range(3)]
    publication = engine.session.publish("request", steps[0], last=False)
    fabric.stop_home()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(engine.session.publish_more, publication, steps[1], last=False, timeout=1.0)
        until(lambda: len(home_session_of(engine.session)._sender._messages.get(publication.number, ())) == 1)
        second = threads.submit(engine.session.publish_more, publication, steps[2], last=True, timeout=SOON)
        assert isinstance(first.exception(SOON), Unreachable)
        assert isinstance(second.exception(SOON), NotPublished)


def test_steps_of_a_read_cancelled_before_its_start_are_dropped(fabric: Fabric) -> None:
    prefill, decode = Prefill(fabric), Decode(fabric)
    prefill.compute(4)
    before = reachable_steps(decode)
    grant = decode.attached(prefill)
    prefill.compute(8)
    decode.until(lambda: decode.steps)
    decode.worker.add_step(decode.steps.pop())
    assert reachable_steps(decode) > before
    decode.scheduler.cancel("mine")
    assert decode.scheduler.cancels() == [grant.read_id]
    decode.worker.cancel(grant.read_id)
    assert reachable_steps(decode) == before


def reachable_steps(decode: Decode) -> int:
    """How many steps the worker's port keeps."""
    found = 0
    left: list[Any] = [decode.worker._steps]
    while left:
        seen = left.pop()
        found += isinstance(seen, GrantStep)
        left += seen.values() if isinstance(seen, dict) else []
        left += [getattr(seen, name) for name in ("_orders", "_ahead", "ahead") if hasattr(seen, name)]
    return found
