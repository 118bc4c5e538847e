"""Integrity mode over real NIXL: what is verified, what is not, and what is found out."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, IntegrityOptions, Read, ReadState, Verification
from kvferry._control.connection import Control
from kvferry.errors import Closed, DataLoss, HomeRecovering
from tests.integrity.conftest import Held, Order, Sources, sources_at
from tests.support.geometry_cases import GQA, MLA, STATE, WINDOWED
from tests.support.held_ranks import allocate, document
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess

FULL = IntegrityOptions("full", patience=30)


def start(held: Held, reference: str, tokens: int, prefix: int = 0) -> list[Read]:
    blocks = allocate(held.engine, tokens, prefix, 2)
    return [
        cache.read(reference, blocks, (prefix, tokens), read_id="r", parties=len(held.ranks))
        for cache, _, _ in held.ranks
    ]


@dataclass(frozen=True)
class Case:
    """A pair of geometries, and (verified, unverified) of each destination rank."""

    source: dict[str, Any]
    destination: dict[str, Any]
    counts: list[tuple[int, int]]
    tokens: int = 75
    prefix: int = 0
    ucx_tls: str = ""


# GQA is 4 layers of key and value, 8 heads. 75 tokens are 5 blocks of 16.
CASES = {
    "tp2-to-tp4": Case({"tp_size": 2}, {"tp_size": 4}, [(8 * 2 * 5, 0)] * 4),
    "tp3-to-tp2": Case(
        {"tp_size": 3, "model": {**GQA, "kv_heads": 6}},
        {"tp_size": 2, "model": {**GQA, "kv_heads": 6}},
        [(8 * 3 * 5, 0)] * 2,
        ucx_tls="tcp",
    ),
    "hnd-to-nhd": Case({"tp_size": 2}, {"layout": "NHD"}, [(8 * 8 * 5, 0)]),
    "nhd-to-hnd-packed": Case({"layout": "NHD"}, {"tp_size": 4, "kv": "packed"}, [(8 * 2 * 5, 0)] * 4),
    "blocks-16-to-64": Case({"tp_size": 2}, {"block_size": 64, "num_blocks": 16}, [(8 * 8 * 5, 0)]),
    # 64, and the 11 tokens of the second.
    "blocks-64-to-16": Case({"block_size": 64, "num_blocks": 16}, {"tp_size": 2}, [(8 * 4 * 2, 0)] * 2),
    # 200 tokens are 5 blocks of 48.
    "blocks-48-to-32-nhd": Case(
        {"block_size": 48, "layout": "NHD"}, {"tp_size": 2, "block_size": 32}, [(8 * 4 * 5, 0)] * 2, 200, ucx_tls="tcp"
    ),
    # Tokens from 21 on: the first block is not read, the second in part.
    "prefix-inside-a-block": Case({"tp_size": 2}, {"block_size": 64}, [(8 * 8 * 3, 8 * 8)], prefix=21),
    "pipeline": Case({"tp_size": 2, "pp_size": 2}, {"pp_size": 4}, [(2 * 8 * 5, 0)] * 4),
    # 2 layers of all 10 blocks; 2 of a window of 40 tokens: of its 4 blocks the first holds one token that is needed.
    "window": Case({"tp_size": 2, "groups": WINDOWED}, {"groups": WINDOWED}, [(4 * 8 * 10 + 4 * 8 * 3, 4 * 8)], 150),
    # 2 layers of attention, 5 blocks; 2 layers with 64 + 16 + 8 units of state in one block.
    "state": Case({"tp_size": 2, "groups": STATE}, {"groups": STATE}, [(4 * 8 * 5 + 2 * 88, 0)]),
    # 3 layers of latent and rope; 4 shards of the tokens; of the third block of 64, 2 hold one of 130 tokens.
    "dcp-to-whole": Case(
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
        {"model": MLA},
        [(6 * (4 + 4 + 2), 0)],
        130,
    ),
    # Each rank holds every fourth token of blocks that were summed whole: 130 tokens are 9 blocks of 16,
    # the last of which holds 2, both of rank 0.
    "whole-to-dcp": Case(
        {"model": MLA},
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 4}},
        [(6, 6 * 8), (0, 6 * 8), (0, 6 * 8), (0, 6 * 8)],
        130,
    ),
    "mla-striped-over-replicas": Case({"tp_size": 4, "model": MLA}, {"model": MLA}, [(6 * 19, 0)], 300),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_good_bytes_are_verified_for_all_geometries(sources: Sources, case: Case) -> None:
    order = Order(document(case.source), case.tokens, FULL, ucx_tls=case.ucx_tls)
    with (
        sources.publish(order) as published,
        sources.destination(document(case.destination), FULL, ucx_tls=case.ucx_tls) as held,
    ):
        reads = start(held, published.reference, case.tokens, case.prefix)
        results = [read.result(60) for read in reads]
        assert [result.verification for result in results] == [Verification(*counts) for counts in case.counts]
        assert all(result.confirmed for result in results)


@pytest.mark.parametrize(
    ("source", "destination", "damage", "place"),
    [
        # (rank, plane, block, unit, state, byte)
        ({"tp_size": 2}, {"tp_size": 4}, (1, "layers.2/value", 3, 6, 9, 17), (3, "tp3")),
        ({"tp_size": 2}, {"tp_size": 4}, (0, "layers.0/key", 4, 0, 10, 0), (0, "tp0")),
        ({"layout": "NHD"}, {"block_size": 64, "tp_size": 2}, (0, "layers.3/key", 0, 7, 0, 31), (1, "tp1")),
        ({"block_size": 64}, {"layout": "NHD"}, (0, "layers.1/value", 1, 5, 3, 2), (0, "tp0")),
        ({"tp_size": 2, "groups": STATE}, {"groups": STATE}, (1, "layers.2/ssm", 0, 4, 0, 77), (0, "tp0")),
    ],
    ids=["tp", "first-and-last", "nhd-to-large-blocks", "large-blocks-to-nhd", "state"],
)
def test_overwritten_byte_is_data_loss_and_named(
    sources: Sources,
    source: dict[str, Any],
    destination: dict[str, Any],
    damage: tuple[int, str, int, int, int, int],
    place: tuple[int, str],
) -> None:
    reader, _ = place
    with (
        sources.publish(Order(document(source), 75, FULL, damage=damage)) as published,
        sources.destination(document(destination), FULL) as held,
    ):
        reads = start(held, published.reference, 75)
        for read in reads:
            read.exception(60)
        error = reads[reader].exception()
        assert isinstance(error, DataLoss)
        rank, plane, block, unit, state, _ = damage
        values = error.values
        assert (values["source_rank"], values["plane"], values["place"], values["unit"], values["source_block"]) == (
            str(rank),
            plane,
            str(block),
            str(unit),
            str(published.damaged_block),
        )
        mine = allocate(held.engine, 75, 0, 2)
        group = next(p.group for p in held.ranks[reader][2].planes if p.name == plane)
        size, theirs = (e.group(group).block_tokens for e in (held.engine, document(source)))
        there = mine[group].ids[(block * theirs + state) // size] if size else mine[group].ids[0]
        assert str(there) in values["destination_blocks"].split(",")
        assert values["expected"] != values["computed"]
        assert (values["mismatches"], error.code, error.quiet) == ("1", "DATA_LOSS", True)
        assert reads[reader].state is ReadState.FAILED
        # Whoever did not read that byte has no complaint.
        assert all(read.exception() is None for index, read in enumerate(reads) if index != reader)


def test_mode_sampled_verifies_a_share_of_the_blocks(sources: Sources) -> None:
    half = IntegrityOptions("sampled", rate=0.5, patience=30)
    engine = document({})
    counts = []
    for source, reader in ((half, half), (FULL, half), (half, FULL)):
        with (
            sources.publish(Order(engine, 640, source)) as published,
            sources.destination(document({"tp_size": 2}), reader) as held,
        ):
            results = [read.result(60) for read in start(held, published.reference, 640)]
            counts.append([result.verification for result in results])
    (first, second) = counts[0]
    assert first is not None
    assert first == second
    assert first.verified + first.unverified == 8 * 4 * 40
    assert 8 * 4 * 8 <= first.verified <= 8 * 4 * 32
    # Sources and readers choose alike, so the smaller share decides.
    assert counts[0] == counts[1] == counts[2]


def test_mode_off_asks_for_nothing_and_sums_nothing(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Control, "read_checksums", lambda *arguments: asked.append(arguments))
    with (
        sources.publish(Order(document({}), 75, IntegrityOptions(), announce=False)) as published,
        sources.destination(document({}), None) as held,
    ):
        assert published.sums == (0,)
        (read,) = start(held, published.reference, 75)
        assert read.result(30).verification is None
        assert asked == []


def test_source_without_sums_leaves_everything_unverified(sources: Sources) -> None:
    with (
        sources.publish(Order(document({}), 75, IntegrityOptions(), announce=False)) as published,
        sources.destination(document({}), FULL) as held,
    ):
        (read,) = start(held, published.reference, 75)
        assert read.result(30).verification == Verification(0, 8 * 8 * 5)


def test_sums_may_arrive_before_their_steps(tmp_path: Path) -> None:
    """A scheduler's port and its ranks talk to the home side by side."""
    group, axes = Group("full", block_tokens=16, num_blocks=8), ("kv", "block", "head", "token", "content")
    memory = np.arange(2 * 8 * 16 * 8, dtype=np.uint8).reshape(2, 8, 1, 16, 8)
    with NodeServerProcess(tmp_path / "home") as server, Client(server.address, integrity=FULL) as client:
        spec = EngineSpec(unique_id("source"), (group,))
        cache = client.register_cache(spec, tensors={"layers.0": memory}, axes=axes)
        early = cache.checksum(1, {"full": Blocks([3])}, last=False, timeout=60)
        publication = cache.session.publish(
            "request", {"full": Blocks([3], end_token=16)}, last=False, checksums=True, timeout=60
        )
        assert (publication.number, early.result(60)) == (1, 2)
        early = cache.checksum(1, {"full": Blocks([5], first_token=16, end_token=32)}, timeout=60)
        cache.session.publish_more(publication, {"full": Blocks([5], first_token=16, end_token=32)}, last=True)
        assert early.result(60) == 2
        into = np.zeros_like(memory)
        reader = client.register_cache(
            EngineSpec(unique_id("reader"), (group,)), tensors={"layers.0": into}, axes=axes, serve=False
        )
        read = reader.read(publication.reference, {"full": Blocks([1, 2])}, (0, 32))
        assert read.result(60).verification == Verification(4, 0)
        # Of what was released nobody needs sums.
        assert cache.session.released(60)
        assert cache.checksum(1, {"full": Blocks([3])}, timeout=1e6).result(60) == 2


def test_sums_of_a_publication_that_never_arrives_delay_no_others(tmp_path: Path) -> None:
    group, axes = Group("full", block_tokens=16, num_blocks=8), ("kv", "block", "head", "token", "content")
    memory = np.zeros((2, 8, 1, 16, 8), np.uint8)
    with NodeServerProcess(tmp_path / "home") as server, Client(server.address, integrity=FULL) as client:
        spec = EngineSpec(unique_id("source"), (group,))
        cache = client.register_cache(spec, tensors={"layers.0": memory}, axes=axes)
        never = [cache.checksum(1000 + number, {"full": Blocks([3])}, timeout=1e6) for number in range(3)]
        for block in (1, 2):
            publication = cache.session.publish(f"r{block}", {"full": Blocks([block])}, checksums=True, timeout=60)
            assert cache.checksum(publication.number, {"full": Blocks([block])}, timeout=60).result(60) == 2
        hopeless = cache.checksum(2000, {"full": Blocks([3])}, timeout=3.0)
        assert isinstance(hopeless.exception(60), HomeRecovering)
        assert not any(future.done() for future in never)
    assert all(isinstance(future.exception(60), Closed) for future in never)


def test_reader_waits_for_sums_that_are_announced(sources: Sources) -> None:
    with (
        sources.publish(Order(document({"tp_size": 2}), 75, FULL, late=True)) as published,
        sources.destination(document({}), FULL) as held,
    ):
        (read,) = start(held, published.reference, 75)
        # All bytes are here, but not the sums.
        while read.progress().done < 75 // 16 * 16:
            assert not read.done()
        assert sources.sum_now().sums == (8 * 4 * 5, 8 * 4 * 5)
        assert read.result(60).verification == Verification(8 * 8 * 5, 0)


def test_rank_that_never_sums_delays_a_read_by_the_patience_only(sources: Sources) -> None:
    with (
        sources.publish(Order(document({"tp_size": 2}), 75, FULL, sum_ranks=(1,))) as published,
        sources.destination(document({}), IntegrityOptions("full", patience=0.05)) as held,
    ):
        (read,) = start(held, published.reference, 75)
        assert read.result(30).verification == Verification(8 * 4 * 5, 8 * 4 * 5)


def test_read_can_be_cancelled_while_it_waits_for_sums(sources: Sources) -> None:
    with (
        sources.publish(Order(document({}), 75, FULL, sum_ranks=())) as published,
        sources.destination(document({}), FULL) as held,
    ):
        (read,) = start(held, published.reference, 75)
        while read.progress().done < 75 // 16 * 16:
            assert not read.done()
        read.cancel()
        read.exception(30)
        assert read.state is ReadState.CANCELLED


def test_sums_lost_by_a_restarted_home_are_no_error(tmp_path: Path) -> None:
    server = NodeServerProcess(tmp_path / "home", tcp=True, engine_ttl=20, ttl=4, max_ttl=4).start()
    try:
        with sources_at(server) as sources, sources.publish(Order(document({}), 75, FULL)) as published:
            assert published.sums == (8 * 8 * 5,)
            server.stop(signal.SIGKILL)
            server.start()
            with sources.destination(document({}), FULL) as held:
                (read,) = start(held, published.reference, 75)
                result = read.result(60)
                assert result.verification == Verification(0, 8 * 8 * 5)
                assert result.confirmed
    finally:
        server.stop()
