"""KV of another prompt is never taken (R14), whatever a router has confused; without sockets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Blocks, Prompt, PromptInput, ReleaseOutcome, router_reference
from kvferry._control.right_prompt import Marker, PromptCheck, ReaderPrompt
from kvferry.errors import InvalidField, PromptMismatch, PromptUnmarked, TransferError
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.references import without_marks
from tests.support.waiting import until
from tests.testing.fabric_engines import POISON, SOON, Engine
from tests.testing.stepping_engines import MINE, THEIRS, TOKENS, VALUES, Decode, Prefill, begin, halfway

IDS = [100 + token for token in range(TOKENS)]
OURS, ANOTHER = Prompt(IDS), Prompt([*IDS[:-2], 7, IDS[-1]])
"""Two prompts of which one token differs."""


def publish(source: Engine, prompt: Prompt, request_id: str = "theirs", tokens: int = TOKENS, **options: Any) -> str:
    """Write a request's KV, and offer it; the reference."""
    ids = THEIRS[: -(-tokens // 4)]
    source.write(VALUES[:, :, :tokens], ids)
    blocks = {"full": Blocks(ids, end_token=tokens)}
    return source.session.publish(request_id, blocks, prompt=prompt, **options).reference


def untouched(engine: Engine) -> bool:
    """Whether no block was written to."""
    return all((memory == POISON).all() for memory in engine.memory)


@pytest.fixture
def pair(fabric: Fabric) -> tuple[Engine, Engine]:
    return Engine(fabric, "p", 2), Engine(fabric, "d", 3)


@pytest.mark.parametrize("hidden", [False, True], ids=["told by the reference", "told by the home"])
def test_kv_of_another_prompt_is_refused_before_a_byte_moves(
    pair: tuple[Engine, Engine], hidden: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    reference = publish(prefill, ANOTHER)
    given = without_marks(reference) if hidden else reference
    for read in decode.read(given, MINE, tokens=(0, TOKENS), prompt=OURS):
        with pytest.raises(PromptMismatch, match="router") as found:
            read.result(SOON)
        assert read.quiet
        assert f"({TOKENS} tokens)" in str(found.value)
        values = found.value.values
        assert (values["source_request_id"], values["engine_id"], values["reader"]) == ("theirs", "p", "d")
        assert (values["tokens"], values["marked"]) == (str(TOKENS), str(TOKENS))
    assert untouched(decode)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3
    assert all("router" in record.getMessage() and "'theirs'" in record.getMessage() for record in errors)
    # It was not declined: the right reader may still come.
    for read in decode.read(given, MINE, tokens=(0, TOKENS), prompt=ANOTHER, read_id="the right one"):
        read.result(SOON)
    assert decode.holds(VALUES, MINE)
    (release,) = prefill.session.released(SOON)
    assert release.outcome is ReleaseOutcome.READ


@pytest.mark.parametrize(
    ("source", "reader"),
    [
        (Prompt(IDS, adapter="one"), Prompt(IDS, adapter="another")),
        (Prompt(IDS, adapter="one"), Prompt(IDS)),
        (Prompt(IDS, inputs=[PromptInput(3, 4, "a")]), Prompt(IDS, inputs=[PromptInput(3, 4, "b")])),
        (Prompt(IDS, inputs=[PromptInput(3, 4, "a")]), Prompt(IDS, inputs=[PromptInput(4, 4, "a")])),
        (Prompt([9, *IDS[1:]]).followed_by([1]), Prompt([*IDS, 1])),
        (OURS.followed_by([1]), Prompt([*IDS, 2])),
    ],
    ids=["adapter", "no adapter", "image", "place of the image", "prompt", "generated"],
)
def test_all_inputs_of_the_kv_are_compared(fabric: Fabric, source: Prompt, reader: Prompt) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = publish(prefill, source)
    (read,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=reader)
    with pytest.raises(PromptMismatch):
        read.result(SOON)


@pytest.mark.parametrize(
    ("source", "reader"),
    [
        (OURS, Prompt([*IDS, 1])),
        (Prompt([*IDS, 1]), OURS),
        (OURS.followed_by([1, 2]), Prompt([*IDS, 2])),
        (Prompt(IDS, inputs=[PromptInput(TOKENS, 1, "beyond")]), OURS),
    ],
    ids=["longer reader", "longer source", "more generated", "image beyond"],
)
def test_a_common_prefix_is_read_though_the_prompts_differ_later(
    fabric: Fabric, source: Prompt, reader: Prompt
) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    (read,) = decode.read(publish(prefill, source), MINE, tokens=(0, TOKENS), prompt=reader)
    read.result(SOON)
    assert decode.workers[0].stats().reads.prompts["matched"] == 1


def test_a_part_of_a_prompt_is_read_by_requests_with_the_same_beginning(fabric: Fabric) -> None:
    """What is published has its own mark, which another request with the same beginning has, too."""
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = publish(prefill, OURS, tokens=16, expected_reads=3)
    for prompt in (OURS, Prompt([*IDS[:16], 1, 2])):
        (read,) = decode.read(reference, MINE[:4], tokens=(0, 16), prompt=prompt)
        read.result(SOON)
    for prompt in (Prompt(IDS[:14]), Prompt([1, *IDS[1:16]]), ANOTHER):
        (read,) = decode.read(reference, MINE[:3], tokens=(0, 12), prompt=prompt)
        with pytest.raises(PromptMismatch):
            read.result(SOON)


def test_unmarked_kv_is_accepted_and_counted_or_refused(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = publish(prefill, Prompt.unknown, expected_reads=2)
    for prompt in (OURS, Prompt.unknown):
        (read,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=prompt)
        read.result(SOON)
    (reader,) = decode.workers
    assert reader.stats().reads.prompts == {"matched": 0, "unmarked": 1, "unknown": 1}

    with Fabric() as other:
        source, port = Engine(other, "p"), Decode(other, prompt_check="require").scheduler
        port.acquire("ours", publish(source, Prompt.unknown), prompt=OURS)
        until(lambda: port.news() == ["ours"])
        with pytest.raises(PromptUnmarked, match="not marked"):
            port.granted("ours")
        # A reader that requires marks names its own prompt.
        port.acquire("silent", publish(source, OURS))
        until(lambda: port.granted("silent") is not None)
        with pytest.raises(PromptUnmarked):
            port.attach("silent", {"full": Blocks(MINE)}, (0, TOKENS))


def test_a_reader_that_has_no_name_for_an_image_is_not_refused_for_it(fabric: Fabric) -> None:
    """It knows its prompt up to the image, and the source marks none of that."""
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = publish(prefill, Prompt(IDS, inputs=[PromptInput(3, 4, "a")]))
    (read,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=Prompt(IDS, inputs=[PromptInput(3, 4)]))
    read.result(SOON)
    assert decode.workers[0].stats().reads.prompts["unmarked"] == 1


def test_the_check_that_is_off_compares_nothing(fabric: Fabric) -> None:
    source, reader = Engine(fabric, "p"), Decode(fabric, prompt_check="off")
    reader.scheduler.acquire("ours", publish(source, ANOTHER), prompt=OURS)
    reader.until(lambda: reader.scheduler.granted("ours"))
    reader.worker.start(reader.scheduler.attach("ours", {"full": Blocks(MINE)}, (0, TOKENS)))
    reader.until(lambda: reader.ended)
    assert reader.ended[0].error is None
    assert reader.holds(TOKENS)


def test_a_scheduler_gets_the_mismatch_with_the_grant_or_at_attach(fabric: Fabric) -> None:
    source, port = Engine(fabric, "p"), Decode(fabric).scheduler
    port.acquire("known", publish(source, ANOTHER), prompt=OURS)
    until(lambda: port.news() == ["known"])
    with pytest.raises(PromptMismatch):
        port.granted("known")
    port.acquire("known later", without_marks(publish(source, ANOTHER)))
    until(lambda: port.granted("known later") is not None)
    with pytest.raises(InvalidField, match="at most the prompt's 20 tokens"):
        port.attach("known later", {"full": Blocks(MINE)}, (0, TOKENS), prompt=Prompt(IDS[:20]))
    with pytest.raises(PromptMismatch):
        port.attach("known later", {"full": Blocks(MINE)}, (0, TOKENS), prompt=OURS)
    assert port.stats().quiet


def test_a_scheduler_declines_no_publication_of_another_prompt(fabric: Fabric) -> None:
    source, port = Engine(fabric, "p"), Decode(fabric).scheduler
    for prompt in (OURS, Prompt(IDS[:-3])):
        with pytest.raises(PromptMismatch, match="a request"):
            port.decline(publish(source, ANOTHER), prompt=prompt)
    hidden = without_marks(publish(source, ANOTHER))
    port.acquire("told by the home", hidden, prompt=OURS)
    until(lambda: port.news() == ["told by the home"])
    with pytest.raises(PromptMismatch, match="told by the home"):
        port.decline(hidden, prompt=OURS)
    port.decline(publish(source, OURS, "mine"), prompt=OURS)
    (release,) = source.session.released(SOON)
    assert (release.request_id, release.outcome) == ("mine", ReleaseOutcome.DECLINED)


def test_a_routers_own_reference_is_compared_as_well(fabric: Fabric) -> None:
    """Both were asked at once, and the router gave them the reference of another request."""
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = router_reference(fabric.address, "p")
    (wrong,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=OURS)
    (right,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=ANOTHER, allow_overlap=True)
    fabric.wait_until_waiting(2)
    publish(prefill, ANOTHER, reference=reference)
    with pytest.raises(PromptMismatch):
        wrong.result(SOON)
    right.result(SOON)
    assert decode.holds(VALUES, MINE)


def test_a_progressive_read_is_refused_with_its_first_step(fabric: Fabric) -> None:
    """The source knows the whole prompt when it has computed its first chunk."""
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    publication = prefill.session.publish("theirs", {}, last=False, prompt=ANOTHER)
    reference = without_marks(publication.reference)
    prefill.write(VALUES[:, :, :8], THEIRS)
    prefill.session.publish_more(publication, {"full": Blocks(THEIRS[:2], 0, 8)}, last=False)
    (read,) = decode.read(reference, MINE, tokens=(0, TOKENS), progressive=True, prompt=OURS)
    with pytest.raises(PromptMismatch):
        read.result(SOON)
    assert untouched(decode)


def test_a_progressive_read_counts_only_once_a_mark_covers_it(fabric: Fabric) -> None:
    """A source that says its prompt with the last step only."""
    prefill = Prefill(fabric)
    decode, another = Engine(fabric, "d"), Engine(fabric, "e")
    (right,) = begin(decode, prefill, prompt=OURS, expected_reads=2)
    (wrong,) = begin(another, prefill, prompt=ANOTHER)
    prefill.compute(8)
    until(lambda: decode.holds(VALUES[:, :, :8], MINE) and another.holds(VALUES[:, :, :8], MINE))
    prefill.write(VALUES, THEIRS)
    rest = {"full": Blocks(THEIRS[2:], 8, TOKENS)}
    prefill.session.publish_more(prefill.publication, rest, last=True, prompt=OURS)
    right.result(SOON)
    with pytest.raises(PromptMismatch):
        wrong.result(SOON)
    assert wrong.wait_quiet(SOON)
    assert decode.holds(VALUES, MINE)


def test_a_restarted_home_sends_the_marks_again(fabric: Fabric) -> None:
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d")
    reference = without_marks(publish(prefill, ANOTHER))
    fabric.stop_home()
    fabric.start_home()
    (read,) = decode.read(reference, MINE, tokens=(0, TOKENS), prompt=OURS)
    with pytest.raises(PromptMismatch):
        read.result(SOON)


def test_a_read_halfway_succeeds_though_its_home_restarts(fabric: Fabric) -> None:
    prefill, decode, read = halfway(fabric, prompt=OURS)
    fabric.stop_home()
    fabric.start_home()
    prefill.write(VALUES, THEIRS)
    rest = {"full": Blocks(THEIRS[2:], 8, TOKENS)}
    prefill.session.publish_more(prefill.publication, rest, last=True, prompt=OURS)
    read.result(SOON)
    assert decode.holds(VALUES, MINE)


def test_a_source_names_one_prompt_per_publication(fabric: Fabric) -> None:
    source = Engine(fabric, "p")
    publication = source.session.publish("theirs", {}, last=False, prompt=OURS)
    for other in (ANOTHER, Prompt(IDS[:4])):
        with pytest.raises(InvalidField, match="begins with"):
            source.session.publish_more(publication, {}, last=True, prompt=other)
    longer = OURS.followed_by([1, 2])
    source.session.publish_more(publication, {"full": Blocks(range(6), end_token=24)}, last=True, prompt=longer)


SHORT = Prompt(IDS[:12])
KEY = bytes(16)


def hinting(prompt: Prompt, ends: tuple[int, ...]) -> pb.Reference:
    """A reference with marks."""
    return pb.Reference(key=KEY, marks=[pb.PromptMark(end=end, digest=prompt.mark(KEY, end)) for end in ends])


@pytest.mark.parametrize("late", [False, True], ids=["known before", "known when it attaches"])
@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (hinting(OURS, (TOKENS,)), "mismatch"),
        (hinting(OURS, (12, TOKENS)), "unmarked"),
        (hinting(SHORT, ()), "unmarked"),
        (hinting(Prompt([1] * 12), (12,)), "mismatch"),
    ],
    ids=["a longer prompt", "a part of it", "no marks", "another prompt"],
)
def test_marks_in_a_reference_refuse_where_an_older_home_tells_none(
    reference: pb.Reference, found: str, late: bool
) -> None:
    own = ReaderPrompt(Prompt.unknown if late else SHORT)
    try:
        own.refuse(reference)
        own.told({}, reference, "theirs", complete=True)
        own.prompt = SHORT
        own.judge(12, complete=True)
    except PromptMismatch:
        assert found == "mismatch"
    else:
        assert own.found == found


def test_a_mark_that_a_router_adds_hides_no_longer_prompt() -> None:
    """It knows the reader's prompt and the key."""
    own, reference = ReaderPrompt(SHORT), hinting(SHORT, (12,))
    own.refuse(reference)
    with pytest.raises(PromptMismatch):
        own.told({TOKENS: ANOTHER.mark(KEY, TOKENS)}, reference, "theirs", complete=True)


TOKEN = st.integers(0, 2)


@given(
    common=st.lists(TOKEN, max_size=6),
    theirs=st.lists(TOKEN, min_size=1, max_size=4),
    generated=st.lists(TOKEN, max_size=3),
    mine=st.lists(TOKEN, min_size=1, max_size=6),
    data=st.data(),
)
def test_accepted_kv_was_computed_from_the_same_tokens(
    common: list[int], theirs: list[int], generated: list[int], mine: list[int], data: st.DataObject
) -> None:
    """Against the definition: the tokens that are taken are equal. And all that a source marks is accepted where its
    reader has the same."""
    source, reader = [*common, *theirs, *generated], [*common, *mine]
    published = data.draw(st.integers(1, len(source)))
    until_token = data.draw(st.integers(1, min(published, len(reader))))
    key = bytes(16)
    step = pb.Publish(last=True, groups=[pb.GroupBlocks(group="full", end_token=published)])
    Marker(key, Prompt([*common, *theirs]).followed_by(generated)).mark(step)
    marks = {mark.end: mark.digest for mark in step.marks}
    for check in (PromptCheck.REQUIRE, PromptCheck.COMPARE):
        own = ReaderPrompt(Prompt(reader), check)
        try:
            own.told(marks, pb.Reference(key=key), "theirs", complete=True)
            own.judge(until_token, complete=True)
        except TransferError:
            assert source != reader[: len(source)] or published > len(reader)
        else:
            assert source[:until_token] == reader[:until_token]
            assert own.found == "matched"
