"""References survive routers unchanged, and whatever else arrives in their place is refused."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import BadReference
from kvferry.reference import MAX_LENGTH, format_reference, parse_reference
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


def test_round_trip() -> None:
    text = format_reference(reference())
    assert text.startswith("kvf1.")
    assert parse_reference(text) == reference()


def test_string_needs_no_quoting_in_urls_headers_and_json() -> None:
    text = format_reference(reference(request_id="\u00e9" * 30))
    assert text.isascii()
    assert all(character.isalnum() or character in "._-" for character in text)


def test_router_made_reference_names_a_key_instead_of_a_publication() -> None:
    made = reference(incarnation=b"", publication=0, router_key="abc")
    assert parse_reference(format_reference(made)).router_key == "abc"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"home": ""}, "no home"),
        ({"engine_id": ""}, "no engine"),
        ({"key": b"short"}, "5 bytes"),
        ({"publication": 0}, "neither"),
        ({"incarnation": b""}, "neither"),
        ({"router_key": "abc"}, "and a router"),
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
def test_anything_else_is_a_typed_error(text: str) -> None:
    try:
        parsed = parse_reference(text)
    except BadReference:
        return
    assert len(parsed.key) == 16


def test_long_string_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadReference, match=str(MAX_LENGTH)):
        parse_reference("kvf1." + "A" * MAX_LENGTH)
