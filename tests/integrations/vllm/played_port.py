"""A scheduler's port that is played: it notes what it was asked to publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry import Blocks, Prompt
from kvferry._control.publications import Publication


class Port:
    """A scheduler's port: what it was asked to do, and the releases that a home has for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: Exception | None = None
        self.number = 0
        self.ends: list[tuple[int, ...]] = []
        """Of each step: the ends of the prompt that it was given."""

    def publish(
        self,
        request_id: str,
        blocks: Mapping[str, Blocks],
        *,
        last: bool = True,
        reference: str = "",
        prompt: Prompt = Prompt.unknown,
        **_: Any,
    ) -> Publication:
        if self.refuses is not None:
            raise self.refuses
        self.ends.append(prompt.ends)
        self.number += 1
        self.calls.append(("publish", tokens_of(blocks), "last" if last else "more", reference))
        return Publication(self.number, request_id, f"canonical-{self.number}")

    def publish_more(
        self,
        publication: Publication,
        blocks: Mapping[str, Blocks],
        *,
        last: bool,
        prompt: Prompt = Prompt.unknown,
        **_: Any,
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.ends.append(prompt.ends)
        self.calls.append(("more", tokens_of(blocks), "last" if last else "more", publication.number))

    def abort(self, publication: Publication) -> None:
        self.calls.append(("abort", publication.number))

    def decline(self, reference: str, **_: Any) -> None:
        self.calls.append(("decline", reference))

    def take(self) -> list[tuple[Any, ...]]:
        found, self.calls = self.calls, []
        return found


def tokens_of(blocks: Mapping[str, Blocks]) -> dict[str, tuple[int, int | None]]:
    return {name: (listed.first_token, listed.end_token) for name, listed in blocks.items()}
