"""References survive routers unchanged, and whatever else arrives in their place is refused."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry._wire.authority import engine_key
from kvferry._wire.reference import (
    MAX_LENGTH,
    format_reference,
    parse_engine_reference,
    parse_reference,
    parse_source_reference,
    router_reference,
)
from kvferry._wire.token import EngineToken
from kvferry.errors import BadReference, InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


def reference(**changes: object) -> pb.Reference:
    fields: dict[str, object] = {
        "home": "10.0.0.1:9411",
        "engine_id": "prefill-0",
        "incarnation": b"i" * 16,
        "publication": 7,
        "request_id": "cmpl-1, with a comma",
        "key": b"k" * 16,
    }
    return pb.Reference(**{**fields, **changes})  # type: ignore[arg-type]


def marks(*ends: int, digest: bytes = b"d" * 16) -> list[pb.PromptMark]:
    return [pb.PromptMark(end=end, digest=digest) for end in ends]


@pytest.mark.parametrize("ends", [(), (1,), (2**64 - 1, 1, 2, 3)])
def test_reference_survives_a_round_trip(ends: tuple[int, ...]) -> None:
    text = format_reference(reference(marks=marks(*ends)))
    assert text.startswith("kvf1.")
    assert parse_reference(text) == reference(marks=marks(*ends))


def test_reference_needs_no_quoting_in_urls_headers_and_json() -> None:
    text = format_reference(reference(request_id="\u00e9" * 30))
    assert text.isascii()
    assert all(character.isalnum() or character in "._-" for character in text)


def test_router_made_reference_names_a_key_instead_of_a_publication() -> None:
    made = reference(incarnation=b"", publication=0, router_key="abc")
    assert parse_reference(format_reference(made)).router_key == "abc"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engine_id": ""}, "no engine"),
        ({"key": b"short"}, "5 bytes"),
        ({"publication": 0}, "neither"),
        ({"incarnation": b""}, "neither"),
        ({"router_key": "abc"}, "and a router"),
        ({"marks": marks(1, 2, 3, 4, 5)}, "5 marks, more than 4"),
        ({"marks": marks(0)}, "no tokens"),
        ({"marks": marks(1, digest=b"15 bytes, no 16")}, "not of 16 bytes"),
        ({"marks": marks(1), "incarnation": b"", "publication": 0, "router_key": "abc"}, "router's key, and has marks"),
    ],
)
def test_incomplete_reference_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BadReference, match=problem):
        parse_reference(format_reference(reference(**changes)))


@given(
    st.one_of(
        st.text(),
        st.text().map(lambda text: "kvf1." + text),
        st.binary().map(lambda raw: "kvf1." + base64.urlsafe_b64encode(raw).decode().rstrip("=")),
    )
)
def test_any_other_string_is_a_typed_error(text: str) -> None:
    try:
        parsed = parse_reference(text)
    except BadReference:
        return
    assert len(parsed.key) == 16


@given(
    st.lists(st.builds(pb.PromptMark, end=st.integers(0, 3), digest=st.binary(min_size=14, max_size=18)), max_size=6)
)
def test_reference_with_many_or_incomplete_marks_is_refused(given_marks: list[pb.PromptMark]) -> None:
    good = len(given_marks) <= 4 and all(mark.end and len(mark.digest) == 16 for mark in given_marks)
    try:
        assert list(parse_reference(format_reference(reference(marks=given_marks))).marks) == given_marks
    except BadReference:
        assert not good
    else:
        assert good


def test_long_string_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadReference, match=str(MAX_LENGTH)):
        parse_reference("kvf1." + "A" * MAX_LENGTH)


def engine_reference(**changes: object) -> pb.EngineReference:
    fields: dict[str, object] = {
        "home": "10.0.0.1:9411",
        "engine_id": "prefill-0",
        "incarnation": b"i" * 16,
        "key": b"k" * 16,
    }
    return pb.EngineReference(**{**fields, **changes})  # type: ignore[arg-type]


def test_engine_reference_survives_a_round_trip_and_cannot_be_read() -> None:
    text = format_reference(engine_reference())
    assert text.startswith("kvf1e.")
    assert parse_engine_reference(text) == engine_reference()
    with pytest.raises(BadReference, match="names an engine"):
        parse_reference(text)
    with pytest.raises(BadReference):
        parse_engine_reference(format_reference(reference()))


def test_a_reference_may_leave_its_home_to_the_readers_directory() -> None:
    assert parse_reference(format_reference(reference(home=""))).home == ""
    assert parse_engine_reference(format_reference(engine_reference(home=""))).home == ""


@pytest.mark.parametrize("field", ["engine_id", "incarnation", "key"])
def test_engine_reference_needs_all_its_fields(field: str) -> None:
    missing = engine_reference()
    missing.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(BadReference):
        parse_engine_reference(format_reference(missing))


@given(st.text(max_size=80), st.binary(max_size=80))
def test_other_strings_are_refused_as_engine_references(text: str, body: bytes) -> None:
    for given_text in (text, "kvf1e." + text, "kvf1e." + base64.urlsafe_b64encode(body).decode()):
        try:
            parsed = parse_engine_reference(given_text)
        except BadReference:
            continue
        assert len(parsed.key) == len(parsed.incarnation) == 16


def test_a_token_makes_the_engine_reference_that_its_home_checks() -> None:
    token = EngineToken("prefill-0", b"s" * 32, "10.0.0.1:9411")
    parsed = parse_engine_reference(token.engine_reference)
    assert (parsed.home, parsed.engine_id, parsed.incarnation) == (token.home, token.engine_id, token.incarnation)
    assert parsed.key == engine_key(token.session_secret)
    assert token.engine_reference not in repr(token)


def test_source_reference_is_that_of_an_engine_or_a_publication() -> None:
    assert parse_source_reference(format_reference(engine_reference())) == engine_reference()
    assert parse_source_reference(format_reference(reference())) == reference()
    by_router = pb.Reference(home="home:1", engine_id="prefill", key=b"k" * 16, router_key="key")
    for text in (format_reference(by_router), "kvf1.damaged", "neither"):
        with pytest.raises(BadReference):
            parse_source_reference(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("home", "h" * 257),
        ("home", None),
        ("engine_id", ""),
        ("engine_id", "e" * 257),
        ("engine_id", "\udcff"),
        ("router_key", "r" * 257),
        ("router_key", 7),
        ("key", b"15 bytes, a key"),
        ("key", "a key of 16 text"),
        ("data_parallel_rank", -1),
        ("data_parallel_rank", 2**32),
        ("data_parallel_rank", 1.0),
    ],
)
def test_router_reference_refuses_wrong_arguments(field: str, value: object) -> None:
    """Otherwise its reference would be refused by everybody to whom it is sent."""
    with pytest.raises(InvalidField) as caught:
        router_reference(**{"home": "home:1", "engine_id": "prefill", field: value})  # type: ignore[arg-type]
    assert caught.value.values["field"] == field
    assert "a key" not in caught.value.message
    longest = router_reference("h" * 256, "e" * 256, router_key="r" * 256, data_parallel_rank=2**32 - 1)
    assert len(longest) < MAX_LENGTH
