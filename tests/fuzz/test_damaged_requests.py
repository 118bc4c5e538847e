"""R9 for every method: any bytes as a request, and well-formed messages with any values in their fields."""

from __future__ import annotations

import random
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry_server.node.server import OFFERED
from tests.fuzz.conftest import EXAMPLES, FUZZ
from tests.fuzz.messages import Place, damaged, edit, places, seed, values
from tests.fuzz.methods import METHODS, Method
from tests.fuzz.target import CPU_PER_LARGE_MESSAGE, Target, encoded

every_method = pytest.mark.parametrize("method", METHODS, ids=str)


def test_services_are_all_fuzzed(target: Target) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    channel: Any = target.channel
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    (answer,) = call(iter([encoded(request)]), timeout=10)
    listed = reflection_pb2.ServerReflectionResponse.FromString(answer).list_services_response.service
    assert sorted(service.name for service in listed) == sorted(OFFERED)


@pytest.mark.property
@every_method
def test_damaged_bytes(target: Target, method: Method) -> None:
    turns = random.Random(str(method))
    with target.unharmed():
        for _ in range(4 * EXAMPLES):
            target.victim.live()
            request = encoded(seed(method, target.victim))
            count = turns.randint(0, 5) if method.client_streams else 1
            raws = [damaged(request, turns) for _ in range(count)]
            target.send(method, raws)


@every_method
def test_fields_with_extreme_values(target: Target, method: Method) -> None:
    with target.unharmed():
        for place in places(method.request):
            target.victim.live()
            for value in values(place.field):
                message = seed(method, target.victim)
                place.put(message, value)
                target.send(method, encoded(message))
            message = seed(method, target.victim)
            place.clear(message)
            target.send(method, encoded(message))


@every_method
@FUZZ
@given(data=st.data())
def test_several_strange_fields(target: Target, method: Method, data: st.DataObject) -> None:
    target.victim.live()
    message = seed(method, target.victim)
    edit(message, data.draw)
    raw = encoded(message)
    if data.draw(st.booleans()):
        # Two messages end to end are one: every oneof of them is set twice, every list is doubled.
        raw += encoded(seed(method, target.victim))
    target.send(method, raw)


LISTS = {
    # Both engines of a plan are the same message.
    (method, place.field.full_name): place
    for method in METHODS
    for place in places(method.request)
    if place.field.is_repeated
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "place"),
    [(method, place) for (method, _), place in LISTS.items()],
    ids=[f"{method}-{place}" for (method, _), place in LISTS.items()],
)
def test_lists_as_long_as_a_message_may_be(target: Target, method: Method, place: Place) -> None:
    message = seed(method, target.victim)
    place.repeat(message, MAX_MESSAGE_BYTES - 2 * message.ByteSize() - 1000)
    raw = encoded(message)
    assert len(raw) > MAX_MESSAGE_BYTES // 3
    with target.unharmed():
        target.send(method, raw, cpu=CPU_PER_LARGE_MESSAGE)
