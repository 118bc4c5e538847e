"""An engine of the same name at another home is another engine."""

from __future__ import annotations

import kvferry
from kvferry import Blocks, Client, EngineSpec
from kvferry._cache import runtime_of
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.errors import EngineUnknown, TransferExpired
from tests.api.conftest import AXES, Pair, array


def test_reading_from_a_namesake_at_another_home_drops_nobody(pair: Pair) -> None:
    with kvferry.serve() as elsewhere, Client(elsewhere.address) as client:
        memory = array()
        memory[:] = 7
        spec = EngineSpec(pair.source.spec.engine_id, pair.source.spec.groups)
        namesake = client.register_cache(spec, tensors={"l": memory}, axes=AXES)
        truth = pair.source.session.publish("truth", {"full": Blocks([11])}, expected_reads=2)
        assert pair.destination.read(truth.reference, {"full": Blocks([1])}).result(30).bytes
        other = namesake.session.publish("other", {"full": Blocks([12])})
        assert pair.destination.read(other.reference, {"full": Blocks([2])}).result(30).bytes
        assert (pair.holds(1), pair.holds(2)) == (11, 7)
        # Neither has to be met again.
        assert pair.destination.gauges().peers == 2


def test_events_of_another_home_about_an_engine_drop_nobody(pair: Pair) -> None:
    """A reference may name any home and any engine."""
    truth = pair.source.session.publish("truth", {"full": Blocks([11])}, expected_reads=2)
    assert pair.destination.read(truth.reference, {"full": Blocks([1])}).result(30).bytes
    with kvferry.serve(engine_ttl=1.0) as elsewhere:
        lie = parse_reference(truth.reference)
        lie.home = elsewhere.address
        read = pair.destination.read(format_reference(lie), {"full": Blocks([2])})
        assert isinstance(read.exception(60), (EngineUnknown, TransferExpired))
    token = pair.source.session.token
    source = (pair.node, token.engine_id, token.incarnation)
    assert runtime_of(pair.destination)._sources.known(source) is not None
    assert pair.destination.gauges().peers == 1
