"""Errors carry their values, cross process boundaries, and map one to one to the contract's reasons."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from kvferry import errors
from kvferry._wire.status import from_notification_error, to_notification_error
from kvferry.engine import RankEnd
from kvferry.v1 import errors_pb2

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.KvferryError)]
WITH_REASON = [cls for cls in ALL if cls.reason]


def test_every_reason_of_the_contract_has_one_error_and_every_error_a_reason_of_the_contract() -> None:
    reasons = set(errors_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert {cls.reason for cls in WITH_REASON} == reasons
    assert len({cls.reason for cls in WITH_REASON}) == len(WITH_REASON)


def test_every_error_is_exported() -> None:
    for cls in ALL:
        assert cls.__name__ in errors.__all__
        assert cls.__module__ == "kvferry.errors"


@pytest.mark.parametrize("cls", WITH_REASON, ids=lambda cls: cls.__name__)
def test_error_is_rebuilt_from_its_reason(cls: type[errors.KvferryError]) -> None:
    rebuilt = errors.from_reason(cls.reason, "message", {"engine_id": "x"}, 2.5)
    assert type(rebuilt) is cls
    assert (rebuilt.message, rebuilt.values, rebuilt.retry_after) == ("message", {"engine_id": "x"}, 2.5)


def example(cls: type[errors.KvferryError]) -> errors.KvferryError:
    """An error of this class, every attribute of which can be told from a default."""
    if cls is errors.Incompatible:
        return errors.Incompatible((errors.Mismatch("format", "layer", "dtype", "a", "b", "dtype differs"),))
    required = [
        7 if parameter.annotation == "int" else "said"
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    error = cls(*required)  # type: ignore[arg-type]
    error.retry_after = 2.5
    error.values["engine_id"] = "x"
    return error


def through_another_process(error: errors.KvferryError) -> errors.KvferryError:
    """As a worker tells it to its scheduler, as plain values."""
    quiet = getattr(error, "quiet", True)
    retry_after, name = error.retry_after, type(error).__name__
    end = RankEnd("r", "q", False, quiet, 0, {}, name, error.message, dict(error.values), retry_after)
    received: RankEnd = pickle.loads(pickle.dumps(end))
    found = received.error()
    assert found is not None
    return found


WAYS: list[Callable[[errors.KvferryError], errors.KvferryError]] = [
    lambda error: pickle.loads(pickle.dumps(error)),
    copy.copy,
    through_another_process,
    lambda error: from_notification_error(to_notification_error(error)) if error.reason else copy.copy(error),
]


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "another process", "wire"])
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_a_rebuilt_error_keeps_every_attribute(
    cls: type[errors.KvferryError], quiet: bool, way: Callable[[errors.KvferryError], errors.KvferryError]
) -> None:
    error = example(cls)
    if isinstance(error, errors.TransferError):
        error.quiet = quiet
    rebuilt = way(error)
    assert type(rebuilt) is cls
    assert (str(rebuilt), rebuilt.retryable) == (str(error), error.retryable)
    if isinstance(error, errors.TransferError) and error.reason and way is WAYS[-1]:
        # No status says whether anything still writes, so the worst is assumed (R4).
        error.__dict__["quiet"] = False
    assert vars(rebuilt) == vars(error)


def test_errors_pickle_with_their_values() -> None:
    bad = pickle.loads(pickle.dumps(errors.BadBlock("full", "source", 7, 4, "out of range")))
    assert isinstance(bad, errors.BadBlock)
    assert bad.values["block"] == "7"
    stuck = pickle.loads(pickle.dumps(errors.TransferStuck("slow", quiet=False, read_id="r")))
    assert (stuck.quiet, stuck.values) == (False, {"read_id": "r"})


def test_incompatible_crosses_the_wire_with_sixteen_sorts_of_mismatches() -> None:
    mismatches = tuple(errors.Mismatch("format", "layer", "format", "a", f"b{i}", f"no {i}") for i in range(20))
    error = errors.Incompatible(mismatches)
    rebuilt = errors.from_reason(error.reason, error.message, error.values)
    assert isinstance(rebuilt, errors.Incompatible)
    assert rebuilt.mismatches == mismatches[:16]
    assert rebuilt.values["mismatches"] == "20"
    assert "and 4 more" in str(rebuilt)


def test_mismatches_that_differ_in_where_they_are_count_as_one() -> None:
    mismatches = [errors.Mismatch("format", f"layer{i}", "format", "a", "b", f"no {i}") for i in range(122)]
    mismatches.insert(7, errors.Mismatch("identity", "identity", "model", "a", "b", "another model"))
    error = errors.Incompatible(tuple(mismatches))
    assert str(error) == "no 0 (and 121 more alike); another model"
    assert len(error.mismatches) == 123
    rebuilt = errors.from_reason(error.reason, error.message, error.values)
    assert isinstance(rebuilt, errors.Incompatible)
    assert rebuilt.mismatches == (mismatches[0], mismatches[7])
    assert (str(rebuilt), rebuilt.values) == (str(error), error.values)
    assert rebuilt.values["mismatch.0.alike"] == "121"


def test_errors_are_retryable_only_if_unavailable_or_with_a_delay() -> None:
    assert errors.EngineIncomplete("x").retryable
    assert errors.EngineIdInUse("x", retry_after=3.0).retryable
    assert errors.LimitReached("x", retry_after=0.1).retryable
    assert not errors.PeerRestarted("x").retryable
    assert not errors.InvalidField("a", 1, "2").retryable


def test_a_foreign_error_class_takes_no_name_and_no_reason_of_kvferrys() -> None:
    class BadBlock(errors.KvferryError, reason="BAD_BLOCK"):
        """Has the name and the reason of another."""

    assert type(errors.from_name("BadBlock", "message", {})) is errors.BadBlock
    assert type(errors.from_reason("BAD_BLOCK", "message", {})) is errors.BadBlock
    assert type(errors.from_name("KvferryError", "message", {})) is errors.KvferryError
    assert type(errors.from_name("Unheard", "message", {})) is errors.InternalError
    assert BadBlock("message").reason == "BAD_BLOCK"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_pickle_by_every_protocol(protocol: int) -> None:
    error = errors.TransferStuck("slow", quiet=False, read_id="r")
    found = pickle.loads(pickle.dumps(error, protocol))
    assert (type(found), vars(found), found.args) == (errors.TransferStuck, vars(error), error.args)
