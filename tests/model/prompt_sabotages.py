"""Mistakes that R14 prevents, each as the smallest change of the shipped code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from kvferry import Prompt
from kvferry._control import publications
from kvferry._control.right_prompt import Marker, PromptCheck, ReaderPrompt
from kvferry._wire.publication import blocks_of
from kvferry.errors import PromptUnmarked
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.publications import Lease
from kvferry_server.domain.records import Records
from kvferry_server.domain.values import LeaseState
from kvferry_server.servicers import decode
from tests.model import readers

Sabotage = Callable[[pytest.MonkeyPatch], None]
OF_A_CONFUSED_ROUTER: dict[str, Sabotage] = {}


def sabotage(make: Sabotage) -> Sabotage:
    OF_A_CONFUSED_ROUTER[make.__name__] = make
    return make


# Of readers.


@sabotage
def marks_are_compared_only_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Bytes move before the comparison."""
    original = ReaderPrompt.judge

    def told(self: ReaderPrompt, marks: Mapping[int, bytes], reference: pb.Reference, *_: Any, **__: Any) -> None:
        self._source, self._marks = reference, dict(marks)

    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        if complete:
            original(self, until, complete=complete)

    patch.setattr(ReaderPrompt, "told", told)
    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def marks_are_not_compared_with_a_late_prompt(patch: pytest.MonkeyPatch) -> None:
    original = ReaderPrompt.judge

    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        patch.setattr(self, "_compare", lambda marks: None)
        original(self, until, complete=complete)

    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def coverage_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        self._compare(self._marks)
        self.found = "matched" if self._marks else "unmarked"

    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def the_first_mark_is_enough(patch: pytest.MonkeyPatch) -> None:
    original = ReaderPrompt.judge

    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        original(self, 1, complete=complete)

    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def longer_prompts_are_taken_for_unmarked(patch: pytest.MonkeyPatch) -> None:
    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        self._compare(self._marks)
        if complete:
            covered = any(until <= end <= self.prompt.known for end in self._marks)
            self.found = "matched" if covered else "unmarked"
            if not covered and self._check is PromptCheck.REQUIRE:
                raise self._error(PromptUnmarked, "a prompt that no mark names")

    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def unmarked_is_accepted_though_marks_are_required(patch: pytest.MonkeyPatch) -> None:
    original = ReaderPrompt.judge

    def judge(self: ReaderPrompt, until: int, *, complete: bool) -> None:
        try:
            original(self, until, complete=complete)
        except PromptUnmarked:
            return

    patch.setattr(ReaderPrompt, "judge", judge)


@sabotage
def marks_in_a_reference_are_trusted(patch: pytest.MonkeyPatch) -> None:
    original = ReaderPrompt.told

    def told(
        self: ReaderPrompt, marks: Mapping[int, bytes], reference: pb.Reference, request_id: str, *, complete: bool
    ) -> None:
        written = {mark.end: mark.digest for mark in reference.marks}
        original(self, {**written, **marks}, reference, request_id, complete=complete)

    patch.setattr(ReaderPrompt, "told", told)


@sabotage
def a_mismatch_declines_the_publication(patch: pytest.MonkeyPatch) -> None:
    original = readers.Share._refuse

    def refuse(self: readers.Share) -> None:
        original(self)
        self._notify(pb.Notification(decline=pb.Decline(reference=self._reference)), lambda _: None)

    patch.setattr(readers.Share, "_refuse", refuse)


# Of prompts, which both engines make.


@sabotage
def adapters_do_not_count(patch: pytest.MonkeyPatch) -> None:
    original = Prompt.__init__

    def make(self: Prompt, token_ids: Any, *, adapter: str = "", inputs: Iterable[Any] = ()) -> None:
        original(self, token_ids, inputs=inputs)

    patch.setattr(Prompt, "__init__", make)


@sabotage
def images_count_by_their_place(patch: pytest.MonkeyPatch) -> None:
    original = Prompt.digest

    def digest(self: Prompt, end: int) -> bytes:
        self.inputs = tuple(type(each)(each.offset, each.length, "an image") for each in self.inputs)
        return original(self, end)

    patch.setattr(Prompt, "digest", digest)


@sabotage
def images_without_a_name_are_taken_for_text(patch: pytest.MonkeyPatch) -> None:
    original = Prompt.__init__

    def make(self: Prompt, token_ids: Any, *, adapter: str = "", inputs: Iterable[Any] = ()) -> None:
        original(self, token_ids, adapter=adapter, inputs=[each for each in inputs if each.identifier])

    patch.setattr(Prompt, "__init__", make)


@sabotage
def a_longer_prompt_keeps_the_digests_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    original = Prompt.followed_by

    def followed_by(self: Prompt, token_ids: Any) -> Prompt:
        made = original(self, token_ids)
        made._digests.update(dict.fromkeys(made.ends, self.digest(self.known)))
        return made

    patch.setattr(Prompt, "followed_by", followed_by)


# Of sources.


@sabotage
def marks_have_the_key_of_the_publication_before(patch: pytest.MonkeyPatch) -> None:
    before = [bytes(16)]

    def marker(key: bytes, prompt: Prompt) -> Marker:
        before.append(key)
        return Marker(before[-2], prompt)

    patch.setattr(publications, "Marker", marker)


@sabotage
def end_of_the_publication_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    original = Marker.mark

    def mark(self: Marker, step: pb.Publish, before: Sequence[pb.Publish] = ()) -> None:
        part = pb.Publish()
        part.CopyFrom(step)
        part.last = False
        original(self, part, before)
        step.marks.extend(part.marks)

    patch.setattr(Marker, "mark", mark)


@sabotage
def marks_are_left_out_of_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A restarted home has lost the marks."""
    original = publications.Offers.snapshot

    def snapshot(self: publications.Offers) -> publications.Snapshot:
        taken = original(self)
        return publications.Snapshot(taken.publications, map(_unmarked, taken.notifications), taken.end)

    patch.setattr(publications.Offers, "snapshot", snapshot)


# Of homes.


@sabotage
def marks_of_last_steps_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    def blocks(message: pb.Publish) -> pb.Blocks:
        return blocks_of(_unmarked(pb.Notification(publish=message)).publish if message.last else message)

    patch.setattr(decode, "blocks_of", blocks)


@sabotage
def marks_of_another_publication_are_sent(patch: pytest.MonkeyPatch) -> None:
    told = list[pb.Publish]()

    def blocks(message: pb.Publish) -> pb.Blocks:
        if message.publication == 1:
            # The source, or all of it, is new.
            told.clear()
        told.append(message)
        wrong = pb.Publish()
        wrong.CopyFrom(message)
        del wrong.marks[:]
        wrong.marks.extend(told[-min(2, len(told))].marks)
        return blocks_of(wrong)

    patch.setattr(decode, "blocks_of", blocks)


@sabotage
def a_read_that_is_refused_counts_as_a_read(patch: pytest.MonkeyPatch) -> None:
    original = Records.end_lease

    def end_lease(self: Records, lease: Lease, state: LeaseState, now: float) -> None:
        if state in (LeaseState.FAILED, LeaseState.CANCELLED):
            lease.publication.valid_reads += 1
        original(self, lease, state, now)

    patch.setattr(Records, "end_lease", end_lease)


def _unmarked(told: pb.Notification) -> pb.Notification:
    copy = pb.Notification()
    copy.CopyFrom(told)
    if copy.HasField("publish"):
        del copy.publish.marks[:]
    return copy
