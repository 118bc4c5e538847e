"""SGLang's rows beside the KV cache, as payloads of publications."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidField
from kvferry.integrations.first_token import FirstToken, first_token, first_token_payload
from kvferry.integrations.sglang.aux_rows import MAGIC, AuxRows, BadPayload

SHAPES = (("int32", 16), ("float32", 128), ("uint64", 8))
ROWS = 4


class Buffers:
    """SGLang's buffers of one rank, as far as tests look at them."""

    def __init__(self, shapes: tuple[tuple[str, int], ...] = SHAPES) -> None:
        self.arrays = [np.zeros((ROWS, width), dtype) for dtype, width in shapes]
        self.rows = AuxRows(
            tuple(array.ctypes.data for array in self.arrays),
            tuple(array[0].nbytes for array in self.arrays),
            vocabulary=512,
        )


def test_a_row_arrives_and_no_other_is_touched() -> None:
    ours, theirs = Buffers(), Buffers()
    ours.arrays[0][2, 0], ours.arrays[1][2, 5], ours.arrays[2][2, 0] = 417, 0.25, 2**63 - 5
    for array in theirs.arrays:
        array[:] = 9
    payload = ours.rows.payload(2, tokens=100)
    assert len(payload) < 200
    assert theirs.rows.write(1, payload, room=2**63 - 5) == 100
    for mine, found in zip(ours.arrays, theirs.arrays, strict=True):
        assert np.array_equal(found[1], mine[2])
        assert np.all(found[[0, 2, 3]] == 9)


def test_first_token_of_another_engine_fills_a_row() -> None:
    buffers = Buffers()
    for array in buffers.arrays:
        array[:] = 9
    assert buffers.rows.write(3, first_token_payload(417, 75), room=2**63 - 5) == 75
    assert buffers.arrays[0][3].tolist() == [417] + [0] * 15
    assert not buffers.arrays[1][3].any()
    assert buffers.arrays[2][3].tolist() == [2**63 - 5] + [0] * 7


def test_payload_of_other_buffers_is_refused_with_both_sizes() -> None:
    other = Buffers((("int32", 16), ("float32", 64), ("uint64", 8)))
    ours = Buffers()
    with pytest.raises(BadPayload, match=r"\[64, 256, 64\].*\[64, 512, 64\]"):
        ours.rows.write(0, other.rows.payload(0, 10), room=1)


@pytest.mark.parametrize("change", ["empty", "cut", "longer", "noise", "huge row"])
def test_damaged_payloads_write_nothing(change: str) -> None:
    ours, theirs = Buffers(), Buffers()
    ours.arrays[0][0, 0], ours.arrays[2][0, 0] = 417, 1
    payload = ours.rows.payload(0, 10)
    damaged = {
        "empty": b"",
        "cut": payload[:-3],
        "longer": payload + b"x",
        "noise": b"kvferry first token 1\n41a",
        "huge row": payload.replace(struct.pack("<II", 64, 2), struct.pack("<II", 64, 2**31), 1),
    }[change]
    with pytest.raises(BadPayload):
        theirs.rows.write(0, damaged, room=1)
    assert not any(array.any() for array in theirs.arrays)


@pytest.mark.parametrize("room", [0, 8, 7 << 32])
def test_the_payload_of_another_request_is_refused(room: int) -> None:
    """SGLang itself takes room 0 for a row that has not come yet: the request would wait for ever."""
    ours, theirs = Buffers(), Buffers()
    ours.arrays[0][0, 0], ours.arrays[2][0, 0] = 417, room
    with pytest.raises(BadPayload, match="bootstrap_room"):
        theirs.rows.write(0, ours.rows.payload(0, 10), room=7)
    assert not any(array.any() for array in theirs.arrays)


@pytest.mark.parametrize("token", [512, 417 + 2**24, 2**31 - 1, -1])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    ours, theirs = Buffers(), Buffers()
    ours.arrays[0][0, 0], ours.arrays[2][0, 0] = token, 1
    payloads = [ours.rows.payload(0, 10)] + ([first_token_payload(token, 10)] if token > 0 else [])
    for payload in payloads:
        with pytest.raises(BadPayload, match="512"):
            theirs.rows.write(0, payload, room=1)
    assert not any(array.any() for array in theirs.arrays)


def test_rows_that_may_not_fit_a_payload_are_refused_at_the_start() -> None:
    with pytest.raises(InvalidField, match="auxiliary buffers"):
        Buffers((("int32", 16), ("float32", 20_000)))


def test_first_token_payloads_are_distinguished_from_others() -> None:
    assert first_token(first_token_payload(0, 1)) == FirstToken(0, 1)
    assert first_token(first_token_payload(2**31 - 1, 75)) == FirstToken(2**31 - 1, 75)
    assert first_token(b"417") is None
    assert first_token(first_token_payload(2**31, 1)) is None
    assert first_token(first_token_payload(417, 75)[:-3]) is None
    for damaged in (b" ", b" 7 5", b" 2147483648", b" -1", b" 1x"):
        assert first_token(first_token_payload(417, 75) + damaged) is None


def test_a_row_that_is_longer_than_its_buffer_writes_nothing() -> None:
    """Any publisher may write the payload; an error of another kind would end SGLang's scheduler."""
    theirs = Buffers()
    rows = [struct.pack("<II", 64, 65) + bytes(65), struct.pack("<II", 512, 0), struct.pack("<II", 64, 1) + b"\1"]
    with pytest.raises(BadPayload, match="longer"):
        theirs.rows.write(0, MAGIC + struct.pack("<QI", 10, 3) + b"".join(rows), room=1)
    assert not any(array.any() for array in theirs.arrays)


@given(st.data())
def test_any_payload_is_written_whole_or_refused(data: st.DataObject) -> None:
    """Rows of any declared and real lengths, cut anywhere."""
    theirs = Buffers()
    sizes = [array[0].nbytes for array in theirs.arrays]
    payload = MAGIC + struct.pack(
        "<QI", data.draw(st.integers(0, 2**64 - 1)), data.draw(st.sampled_from([3, 3, 3, 0, 2, 4]))
    )
    for number, size in enumerate(sizes):
        # The last one is the room.
        row = (b"\1" if number == 2 else b"") + bytes(data.draw(st.sampled_from([0, size - 1, size, 2 * size])))
        payload += struct.pack("<II", data.draw(st.sampled_from([size, size, size, 0])), len(row)) + row
    try:
        theirs.rows.write(1, payload[: data.draw(st.sampled_from([len(payload)] * 3 + [len(payload) - 1, 40]))], room=1)
    except BadPayload:
        assert not any(array.any() for array in theirs.arrays)
    assert not any(array[[0, 2, 3]].any() for array in theirs.arrays)
