"""What engines declare wrongly and is refused when they register, before any request could get wrong bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, EngineSpec, EngineToken, Group, Interval
from kvferry.engine import WorkerPort
from kvferry.errors import BadGeometry, CacheDiffers
from kvferry.geometry.tensors import Holding
from kvferry.testing import Fabric

AXES = ("kv", "block", "head", "token", "content")
GROUP = Group("full", block_tokens=4, num_blocks=8)
SOON = 60.0


def memory(heads: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.zeros((2, 8, heads, 4, 2), np.uint16)


def register(client: Client, spec: EngineSpec, rank: int, heads: range, token: EngineToken | None = None) -> Cache:
    return client.register_cache(
        spec, rank, tensors={"layers.0": memory(len(heads))}, axes=AXES, heads=heads, total_heads=6, token=token
    )


@pytest.mark.parametrize("serve", [True, False])
def test_the_last_rank_of_an_engine_that_lacks_heads_is_refused(fabric: Fabric, serve: bool) -> None:
    client, spec = fabric.client(), EngineSpec("d", (GROUP,), num_ranks=2)
    token = client.open_engine(spec).token
    register(client, spec, 0, range(3))
    other = fabric.client()
    with pytest.raises(BadGeometry, match=r"plane layers\.0/.*units \[3, 6\) of 6 .*\[0, 3\) all tokens by ranks 0 1"):
        other.register_cache(
            spec,
            1,
            tensors={"layers.0": memory()},
            axes=AXES,
            heads=range(3),
            total_heads=6,
            token=token,
            serve=serve,
        )
    # It may correct itself, without another start of the engine.
    register(other, spec, 1, range(3, 6), token)
    p = fabric.client().register_cache(
        EngineSpec("p", (GROUP,)), tensors={"layers.0": memory(6)}, axes=AXES, heads=range(6), total_heads=6
    )
    reference = p.session.publish("request", {"full": Blocks([1])}).reference
    fine = fabric.client().register_cache(
        EngineSpec("q", (GROUP,)), tensors={"layers.0": memory(6)}, axes=AXES, heads=range(6), total_heads=6
    )
    fine.read(reference, {"full": Blocks([1])}).result(SOON)


def test_a_refused_registration_leaves_nothing(fabric: Fabric) -> None:
    """Not its groups either, which a rank that corrects itself may declare otherwise."""
    client, larger = fabric.client(), Group("full", block_tokens=4, num_blocks=16)
    wrong, right = EngineSpec("d", (GROUP,)), EngineSpec("d", (larger,))
    session = client.open_engine(right)
    with pytest.raises(BadGeometry, match=r"units \[3, 6\) of 6"):
        register(fabric.client(), wrong, 0, range(3), session.token)
    tensor = np.zeros((2, 16, 6, 4, 2), np.uint16)
    fabric.client().register_cache(
        right, tensors={"layers.0": tensor}, axes=AXES, heads=range(6), total_heads=6, token=session.token
    )
    mine = memory(6)
    tensor[:, 12] = 7
    publication = session.publish("request", {"full": Blocks([12])})
    reader = fabric.client().register_cache(EngineSpec("p", (GROUP,)), tensors={"layers.0": mine}, axes=AXES)
    reader.read(publication.reference, {"full": Blocks([1])}).result(SOON)
    assert (mine[:, 1] == 7).all()


def test_an_engine_of_one_rank_that_lacks_heads_is_refused(fabric: Fabric) -> None:
    client, spec = fabric.client(), EngineSpec("d", (GROUP,))
    with pytest.raises(BadGeometry, match="partial=True"):
        register(client, spec, 0, range(3))
    register(client, spec, 0, range(6))


def test_an_engine_that_says_that_it_is_partial_reads_what_it_holds(fabric: Fabric) -> None:
    theirs, mine = memory(6), memory(2)
    theirs[...] = np.arange(theirs.size, dtype=np.uint16).reshape(theirs.shape)
    p = fabric.client().register_cache(
        EngineSpec("p", (GROUP,)), tensors={"l": theirs}, axes=AXES, heads=range(6), total_heads=6
    )
    d = fabric.client().register_cache(
        EngineSpec("d", (GROUP,), partial=True), tensors={"l": mine}, axes=AXES, heads=range(2, 4), total_heads=6
    )
    d.read(p.session.publish("request", {"full": Blocks([1])}).reference, {"full": Blocks([5])}).result(SOON)
    assert (mine[:, 5] == theirs[:, 1, 2:4]).all()


def test_ranks_agree_on_whether_their_engine_is_partial(fabric: Fabric) -> None:
    client, spec = fabric.client(), EngineSpec("d", (GROUP,), num_ranks=2)
    token = client.open_engine(spec).token
    register(client, spec, 0, range(3))
    with pytest.raises(CacheDiffers, match="partial"):
        register(fabric.client(), EngineSpec("d", (GROUP,), num_ranks=2, partial=True), 1, range(3), token)


@pytest.mark.parametrize("serve", [True, False])
def test_two_layers_over_one_tensor_are_refused(fabric: Fabric, serve: bool) -> None:
    tensor = memory(1)
    with pytest.raises(BadGeometry) as caught:
        fabric.client().register_cache(
            EngineSpec("e", (GROUP,)), tensors={"layers.0": tensor, "layers.1": tensor}, axes=AXES, serve=serve
        )
    assert "planes layers.0/value and layers.1/value" in str(caught.value)
    assert "Are both layers the same tensor?" in str(caught.value)
    assert "0x" not in str(caught.value)


def test_two_layers_over_one_tensor_are_refused_before_the_engine_has_a_token(fabric: Fabric) -> None:
    tensor, worker = memory(1), WorkerPort(fabric.client(), EngineSpec("e", (GROUP,), num_ranks=2))
    with pytest.raises(BadGeometry, match="Are both layers the same tensor"):
        worker.register_memory({"layers.0": tensor, "layers.1": tensor}, axes=AXES, replicated=True)


def test_layers_that_say_that_they_share_a_cache_are_read_from(fabric: Fabric) -> None:
    tensor, mine = memory(1), {"layers.0": memory(1), "layers.1": memory(1)}
    tensor[...] = np.arange(tensor.size, dtype=np.uint16).reshape(tensor.shape)
    holding = Holding(units=Interval(0, 1), axis_size=1, shared=True)
    p = fabric.client().register_cache(
        EngineSpec("p", (GROUP,)), tensors={"layers.0": tensor, "layers.1": tensor}, axes=AXES, holding=holding
    )
    d = fabric.client().register_cache(EngineSpec("d", (GROUP,)), tensors=mine, axes=AXES)
    d.read(p.session.publish("request", {"full": Blocks([1])}).reference, {"full": Blocks([5])}).result(SOON)
    assert all((own[:, 5] == tensor[:, 1]).all() for own in mine.values())
