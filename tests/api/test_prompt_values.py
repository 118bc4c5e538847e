"""`kvferry.Prompt`: its marks are those of the contract, whatever an engine makes it of."""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry import Prompt, PromptInput
from kvferry.errors import InvalidField
from tests.support.prompt_marks import Case, vectors

KEY, VECTORS = vectors()
TOKENS = [0, 1, 127, 7, 7]
"""Token ids that every integer type can hold."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
token_ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=24)
identifiers = st.sampled_from(["a", "b", "\uffff", "\U00010000"]) | texts.filter(bool)


def inputs(identifiers: st.SearchStrategy[str]) -> st.SearchStrategy[list[PromptInput]]:
    """Inputs in any order, some at the same token."""
    return st.lists(st.builds(PromptInput, st.integers(0, 24) | st.just(0), st.integers(0, 3), identifiers), max_size=5)


@pytest.mark.parametrize(("case", "digest"), VECTORS, ids=lambda value: value.hex() if type(value) is bytes else "")
def test_test_vectors_of_the_contract(case: Case, digest: bytes) -> None:
    assert case.defined(KEY) == digest
    assert case.prompt().mark(KEY, case.end) == digest


@example([7], "", [PromptInput(0, *each) for each in ((2, "a"), (1, "b"), (1, "\U00010000"), (1, "\uffff"))], [1], b"")
@given(token_ids, texts, inputs(identifiers), st.lists(st.integers(1, 24), min_size=1), st.binary(max_size=80))
def test_marks_are_those_of_the_definition_in_any_order(
    tokens: list[int], adapter: str, inputs: list[PromptInput], ends: list[int], key: bytes
) -> None:
    prompt = Prompt(tokens, adapter=adapter, inputs=iter(inputs))
    assert (len(prompt), bool(prompt), prompt.known, prompt.ends) == (len(tokens), True, len(tokens), (len(tokens),))
    assert sorted(prompt.inputs, key=repr) == sorted(inputs, key=repr)
    for end in ends:
        if end <= len(tokens):
            case = Case(tokens, end, adapter, tuple(inputs))
            assert prompt.mark(key, end) == case.defined(key)


@given(
    token_ids,
    st.lists(st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=9), st.lists(st.integers(1, 32), max_size=3))),
    texts,
    inputs(identifiers | st.just("")),
)
def test_a_prompt_that_is_continued_is_the_whole_prompt(
    tokens: list[int], more: list[tuple[list[int], list[int]]], adapter: str, inputs: list[PromptInput]
) -> None:
    """Whichever marks it was asked for in between."""
    prompt = Prompt(tokens, adapter=adapter, inputs=inputs)
    known = {prompt.known}
    for step, asked in more:
        for end in asked:
            if end <= prompt.known:
                prompt.mark(KEY, end)
        before, length = prompt, len(tokens)
        tokens = [*tokens, *step]
        prompt = prompt.followed_by(step)
        assert len(before) == length
        known.add(prompt.known)
    whole = Prompt(tokens, adapter=adapter, inputs=inputs)
    assert (len(prompt), prompt.known, prompt.ends) == (len(whole), whole.known, tuple(sorted(known - {0})))
    assert (prompt.adapter, prompt.inputs) == (whole.adapter, whole.inputs)
    for end in range(whole.known, 0, -1):
        assert prompt.mark(KEY, end) == Case(tokens, end, adapter, tuple(inputs)).defined(KEY)


@given(token_ids, inputs(identifiers | st.just("")))
def test_a_prompt_is_known_up_to_its_first_input_without_an_identifier(
    tokens: list[int], inputs: list[PromptInput]
) -> None:
    prompt = Prompt(tokens, inputs=inputs)
    assert prompt.known == min([len(tokens), *(each.offset for each in inputs if not each.identifier)])
    assert prompt.ends == ((prompt.known,) if prompt.known else ())
    for end in (prompt.known + 1, 0, -1):
        with pytest.raises(InvalidField, match="as far as the prompt is known"):
            prompt.mark(KEY, end)


ANOTHER: dict[str, Prompt] = {
    "a token": Prompt([1, 2, 4, 3], adapter="a", inputs=[PromptInput(1, 2, "i")]),
    "the order": Prompt([2, 1, 3, 3], adapter="a", inputs=[PromptInput(1, 2, "i")]),
    "the adapter": Prompt([1, 2, 3, 3], adapter="b", inputs=[PromptInput(1, 2, "i")]),
    "no adapter": Prompt([1, 2, 3, 3], inputs=[PromptInput(1, 2, "i")]),
    "the input": Prompt([1, 2, 3, 3], adapter="a", inputs=[PromptInput(1, 2, "j")]),
    "its place": Prompt([1, 2, 3, 3], adapter="a", inputs=[PromptInput(0, 2, "i")]),
    "its length": Prompt([1, 2, 3, 3], adapter="a", inputs=[PromptInput(1, 3, "i")]),
    "no input": Prompt([1, 2, 3, 3], adapter="a"),
    "one input more": Prompt([1, 2, 3, 3], adapter="a", inputs=[PromptInput(1, 2, "i"), PromptInput(3, 0, "i")]),
}


@pytest.mark.parametrize("difference", ANOTHER)
def test_another_prompt_has_another_mark(difference: str) -> None:
    prompt, another = Prompt([1, 2, 3, 3], adapter="a", inputs=[PromptInput(1, 2, "i")]), ANOTHER[difference]
    assert prompt.mark(KEY, 4) != another.mark(KEY, 4)
    assert prompt.mark(KEY, 4) != prompt.mark(KEY[::-1], 4)


class Other(Sequence[int]):
    """A sequence of an engine's own."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: Any) -> Any:
        return TOKENS[index]


INTEGERS = "bBhHiIlLqQ"
KINDS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(TOKENS),
    "deque": lambda: deque(TOKENS),
    "a sequence of its own": Other,
    "numpy's integers in a list": lambda: [np.int64(token) for token in TOKENS],
    "every second of an array": lambda: np.array([token for each in TOKENS for token in (each, 9)])[::2],
    **{f"array of {kind}": partial(array, kind, TOKENS) for kind in INTEGERS},
    **{f"numpy's {order}{kind}": partial(np.array, TOKENS, order + kind) for order in "<>" for kind in INTEGERS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_may_come_in_any_form_that_engines_have(kind: str) -> None:
    expected = [Case(TOKENS, end).defined(KEY) for end in (1, len(TOKENS))]
    prompt = Prompt(KINDS[kind]())
    assert [prompt.mark(KEY, end) for end in (1, len(TOKENS))] == expected
    assert Prompt(TOKENS[:2]).followed_by(KINDS[kind]()).mark(KEY, 7) == Case([*TOKENS[:2], *TOKENS], 7).defined(KEY)


def test_tensors_of_torch_are_token_ids() -> None:
    torch = pytest.importorskip("torch")
    for kind in (torch.uint8, torch.int32, torch.int64):
        assert Prompt(torch.tensor(TOKENS, dtype=kind)).mark(KEY, 5) == Case(TOKENS, 5).defined(KEY)
    for wrong in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1]]), torch.tensor(1), torch.tensor([-1])):
        with pytest.raises(InvalidField):
            Prompt(wrong)
    with pytest.raises(InvalidField):
        Prompt(torch.tensor(TOKENS, device="meta"))


@pytest.mark.parametrize("given", [list(TOKENS), array("I", TOKENS), np.array(TOKENS, np.uint32)], ids=type)
def test_token_arrays_may_change_afterwards(given: Any) -> None:
    prompt = Prompt(given)
    given[0] = 99
    assert prompt.mark(KEY, 5) == Case(TOKENS, 5).defined(KEY)


SECRET = 31337


class Raising(Sequence[int]):
    """Raises what has a token in its text."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(f"no token {SECRET} today")


class RaisingArray:
    """Another library's array, whose memory is elsewhere."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{SECRET} is on a device")


def raising() -> Iterator[int]:
    yield SECRET
    raise RuntimeError(str(SECRET))


WRONG: dict[str, Any] = {
    "None": None,
    "a token": SECRET,
    "text": f"a prompt, {SECRET}",
    "bytes": b"31337",
    "a bytearray": bytearray(b"31337"),
    "a view": memoryview(array("I", [SECRET])),
    "negative": [SECRET, -1],
    "too large": [SECRET, 2**32],
    "far too large": [SECRET, 2**70],
    "floats": [SECRET, 1.0],
    "texts": [SECRET, str(SECRET)],
    "rows": [[SECRET], [SECRET]],
    "nothing in it": [SECRET, None],
    "a set has no order": {SECRET, 1},
    "a mapping": {SECRET: 1},
    "an iterator is used up": iter([SECRET]),
    "an iterator that raises": raising(),
    "a sequence that raises": Raising(),
    "an array that raises": RaisingArray(),
    "an array of floats": array("d", [SECRET]),
    "numpy's floats": np.array([SECRET], np.float32),
    "numpy's bools": np.array([True, False]),
    "numpy's objects": np.array([SECRET, 1], object),
    "numpy's texts": np.array([str(SECRET)]),
    "numpy's rows": np.array([[SECRET]]),
    "numpy's scalar": np.int64(SECRET),
    "numpy's negative": np.array([SECRET, -1]),
    "numpy's too large": np.array([SECRET, 2**32]),
    "numpy's unsigned too large": np.array([SECRET, 2**64 - 1], np.uint64),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_values_that_are_no_token_ids_are_refused_and_not_shown(wrong: str) -> None:
    for call in (Prompt, Prompt([1]).followed_by):
        with pytest.raises(InvalidField) as caught:
            call(WRONG[wrong])
        assert caught.value.values["field"] == "token_ids"
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.values)
        assert str(SECRET) not in shown


def test_a_prompt_shows_no_tokens() -> None:
    assert repr(Prompt([SECRET])) == "Prompt(1 tokens)"


def test_a_continuation_of_an_unknown_prompt_is_unknown() -> None:
    """The tokens that were generated are not the first of the request."""
    for unknown in (Prompt.unknown, Prompt.unknown.followed_by([1, 2]), Prompt([])):
        assert (bool(unknown), len(unknown), unknown.known, unknown.ends) == (False, 0, 0, ())
        assert repr(unknown) == "Prompt.unknown"
        with pytest.raises(InvalidField):
            unknown.digest(1)


@pytest.mark.parametrize("carried", [copy.deepcopy, lambda prompt: pickle.loads(pickle.dumps(prompt))])
def test_a_prompt_travels_with_its_request(carried: Callable[[Prompt], Prompt]) -> None:
    given = [PromptInput(1, 1, "i"), PromptInput(4, 1)]
    prompt = Prompt(TOKENS[:3], adapter="a", inputs=given).followed_by(TOKENS[3:])
    arrived = carried(prompt)
    assert (arrived.ends, arrived.known, arrived.adapter, arrived.inputs) == ((3, 4), 4, "a", tuple(given))
    assert arrived.mark(KEY, 4) == prompt.mark(KEY, 4)
    assert arrived.followed_by([1]).ends == (3, 4)
    assert not carried(Prompt.unknown)


def test_several_threads_share_a_prompt() -> None:
    tokens = np.arange(50_000)
    prompt, both = Prompt(tokens), threading.Barrier(4)
    ends = [*range(1, 50_000, 4_999), 50_000]
    expected = {end: Case(range(50_000), end).defined(KEY) for end in ends}

    def ask(turn: int) -> list[bool]:
        both.wait()
        ordered = [*ends[turn:], *ends[:turn]] if turn % 2 else ends[::-1]
        followed = prompt.followed_by([turn])
        return [prompt.mark(KEY, end) == expected[end] == followed.mark(KEY, end) for end in ordered]

    with ThreadPoolExecutor(4) as pool:
        for right in pool.map(ask, range(4)):
            assert all(right)


def test_threads_that_mark_other_ends_do_not_disturb_each_other() -> None:
    prompt = Prompt(np.arange(4_000))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            # Raises what a thread has raised.
            list(pool.map(lambda turn: [prompt.digest(end) for end in range(1 + turn, 2_000, 8)], range(8)))
    finally:
        sys.setswitchinterval(interval)


class CountedHash:
    """SHA-256 that counts the bytes it is given."""

    count = 0

    def __init__(self, begun: Any) -> None:
        self._state = hashlib.sha256(begun) if isinstance(begun, bytes) else begun

    def update(self, data: bytes) -> None:
        CountedHash.count += len(data)
        self._state.update(data)

    def copy(self) -> CountedHash:
        return CountedHash(self._state.copy())

    def digest(self) -> Any:
        return self._state.digest()


@pytest.mark.parametrize("carried", [lambda prompt: prompt, copy.copy], ids=["as made", "copied"])
def test_marks_of_a_source_make_a_reader_hash_its_prompt_only_once(
    carried: Callable[[Prompt], Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source may mark 64 ends just before that of a reader's long prompt, and a scheduler compares them in a step."""
    monkeypatch.setattr("kvferry._prompt.hashlib", SimpleNamespace(sha256=CountedHash))
    tokens = np.arange(10_000)
    prompt = carried(Prompt(tokens))
    monkeypatch.setattr(CountedHash, "count", 0)
    for end in range(len(tokens) - 64, len(tokens)):
        prompt.digest(end)
    assert CountedHash.count <= 4 * len(tokens)
