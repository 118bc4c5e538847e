"""The ends of a request and of a publication with another prompt that the request reads.

The home and the connector's scheduler are real, vLLM's steps are played. With real engines: test_exchanged_prompts.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from kvferry import Blocks, Prompt, router_reference
from kvferry.integrations.vllm.metrics import REASONS
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.testing import Fabric
from tests.integrations.vllm.played_setup import TOKENS, prefill, to_read
from tests.support.waiting import until

LENGTH = 2 * TOKENS + 1
OTHER = Prompt(range(100, 100 + LENGTH))
THEIRS = {"0": Blocks([1, 2, 3], 0, LENGTH)}


@pytest.mark.parametrize("shorter", [0, 3])
@pytest.mark.parametrize("routed", [False, True], ids=["after-prefill", "both-at-once"])
def test_publication_of_another_prompt_is_refused_before_a_byte_moves_and_kept(
    fabric: Fabric,
    decode: Callable[..., ConnectorScheduler],
    caplog: pytest.LogCaptureFixture,
    *,
    routed: bool,
    shorter: int,
) -> None:
    """Also if the reader's is the beginning of it, and its source still computes it."""
    scheduler = decode()
    length = LENGTH - shorter
    allocated = [4, 5, 6][: -(-length // TOKENS)]
    with fabric.client() as client:
        source = prefill(client)
        reference = router_reference(fabric.address, "prefill") if routed else ""
        made = source.publish(
            "theirs",
            THEIRS if not routed else {"0": Blocks([1], 0, TOKENS)},
            last=not routed,
            reference=reference,
            prompt=OTHER,
        )
        reader = to_read(reference or made.reference, length)
        if shorter:
            reader.prompt_token_ids = list(range(100, 100 + length))
        scheduler.on_new_request(reader)
        # vLLM can only be told once it has allocated blocks.
        until(lambda: scheduler.matched_tokens(reader, 0) != (None, False))
        assert scheduler.matched_tokens(reader, 0) == (length, True)
        scheduler.allocated("reader", (allocated,), length)
        metadata = scheduler.step({})
        assert (metadata.starts, metadata.received, metadata.lost) == ([], {"reader"}, set(allocated))
        [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert all(part in line.getMessage() for part in ("PromptMismatch", "router", "'reader'", "'theirs'"))
        stats = scheduler.take_stats()
        assert stats is not None
        assert stats.data[REASONS] == {"PromptMismatch": 1}
        # vLLM computes it, and nobody here reads the publication.
        scheduler.told({"reader"})
        scheduler.step({})
        assert made.number not in [release.publication for release in source.released()]
        if routed:
            source.publish_more(made, {"0": Blocks([2, 3], TOKENS, LENGTH)}, last=True, prompt=OTHER)
        own = to_read(reference or made.reference, LENGTH, "own")
        own.prompt_token_ids = list(range(100, 100 + LENGTH))
        scheduler.on_new_request(own)
        until(lambda: scheduler.matched_tokens(own, 0) == (LENGTH - 1, True))


def test_publication_of_another_prompt_is_not_declined_if_vllm_has_all_blocks(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler]
) -> None:
    """The reference's marks show the other prompt."""
    scheduler = decode()
    with fabric.client() as client:
        source = prefill(client)
        made = source.publish("theirs", THEIRS, prompt=OTHER)
        reader = to_read(made.reference, LENGTH)
        scheduler.on_new_request(reader)
        until(lambda: "reader" in scheduler._port.news())
        assert scheduler.matched_tokens(reader, 0) == (LENGTH, True)
        assert scheduler.matched_tokens(reader, LENGTH - 1) == (0, False)
        own = to_read(made.reference, LENGTH, "own")
        own.prompt_token_ids = list(range(100, 100 + LENGTH))
        scheduler.on_new_request(own)
        until(lambda: scheduler.matched_tokens(own, 0) == (LENGTH - 1, True))


@pytest.mark.parametrize("ends", ["found-here", "shorter", "aborted", "aborted-later", "not-reading"])
def test_request_that_will_not_be_read_declines_no_publication_of_another_prompt(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler], *, ends: str
) -> None:
    """vLLM has all of the reader's own prompt already, or aborts it, before the connector has asked for the grant."""
    scheduler = decode(reads=ends != "not-reading")
    length = LENGTH - 1 if ends == "shorter" else LENGTH
    with fabric.client() as client:
        source = prefill(client)
        kept, freed = (source.publish(name, THEIRS, prompt=OTHER) for name in ("kept", "freed"))
        reader = to_read(kept.reference, length)
        if ends == "shorter":
            reader.prompt_token_ids = list(range(100, 100 + length))
        scheduler.on_new_request(reader)
        if ends in ("found-here", "shorter"):
            assert scheduler.matched_tokens(reader, length - 1) == (0, False)
        elif ends != "not-reading":
            if ends == "aborted-later":
                until(lambda: "reader" in scheduler._port.news())
            reader.status = RequestStatus.FINISHED_ABORTED
            scheduler.finished(reader, ([],))
        told = to_read(freed.reference, LENGTH, "told")
        told.abort_immediately, told.status = True, RequestStatus.FINISHED_ABORTED
        scheduler.on_new_request(told)
        [release] = source.released(20.0)
        assert release.publication == freed.number
        if ends == "not-reading":
            return
        own = to_read(kept.reference, LENGTH, "own")
        own.prompt_token_ids = list(range(100, 100 + LENGTH))
        scheduler.on_new_request(own)
        until(lambda: scheduler.matched_tokens(own, 0) == (LENGTH - 1, True))


def test_routers_reference_is_not_declined_after_a_grant_of_another_prompt(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler]
) -> None:
    """Nothing is known before: it names no marks."""
    scheduler = decode()
    with fabric.client() as client:
        source = prefill(client)
        reference = router_reference(fabric.address, "prefill")
        source.publish("theirs", THEIRS, reference=reference, prompt=OTHER)
        reader = to_read(reference, LENGTH)
        scheduler.on_new_request(reader)
        until(lambda: scheduler._port.news() == ["reader"])
        assert scheduler.matched_tokens(reader, LENGTH - 1) == (0, False)
        own = to_read(reference, LENGTH, "own")
        own.prompt_token_ids = list(range(100, 100 + LENGTH))
        scheduler.on_new_request(own)
        until(lambda: scheduler.matched_tokens(own, 0) == (LENGTH - 1, True))


def test_notice_of_a_failed_request_declines_no_publication_of_another_prompt(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler]
) -> None:
    """It adds a request with the same parameters and a token for a prompt, which it aborts at once. Other publications
    are free then."""
    scheduler = decode()
    with fabric.client() as client:
        source = prefill(client)
        kept, freed = (source.publish(name, THEIRS, prompt=OTHER) for name in ("kept", "freed"))
        reader = to_read(kept.reference, LENGTH)
        scheduler.on_new_request(reader)
        until(lambda: scheduler.matched_tokens(reader, 0) == (LENGTH, True))
        scheduler.allocated("reader", ([4, 5, 6],), LENGTH)
        scheduler.step({})
        reader.status = RequestStatus.FINISHED_ERROR
        scheduler.finished(reader, ([],))
        for made in (kept, freed):
            told = to_read(made.reference, 1, f"told-{made.number}")
            told.abort_immediately, told.status = True, RequestStatus.FINISHED_ABORTED
            scheduler.on_new_request(told)
            scheduler.finished(told, ([],))
        [release] = source.released(20.0)
        assert release.publication == freed.number


@pytest.mark.parametrize(("check", "read"), [("compare", True), ("require", False), ("off", True)])
def test_source_without_marks_is_read_unless_marks_are_required(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler], *, check: str, read: bool
) -> None:
    scheduler = decode(prompt_check=check)
    with fabric.client() as client:
        made = prefill(client).publish("theirs", THEIRS)
        reader = to_read(made.reference, LENGTH)
        scheduler.on_new_request(reader)
        until(lambda: scheduler.matched_tokens(reader, 0) != (None, False))
        scheduler.matched_tokens(reader, 0)
        scheduler.allocated("reader", ([4, 5, 6],), LENGTH - 1)
        assert bool(scheduler.step({}).starts) == read


def test_client_with_prompt_check_off_takes_any_publication(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler]
) -> None:
    scheduler = decode(prompt_check="off")
    with fabric.client() as client:
        made = prefill(client).publish("theirs", THEIRS, prompt=OTHER)
        reader = to_read(made.reference, LENGTH)
        scheduler.on_new_request(reader)
        until(lambda: scheduler.matched_tokens(reader, 0) == (LENGTH - 1, True))
