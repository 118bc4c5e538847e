"""The requests that decode wants to read: each from its arrival until its read has ended or was given up."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry import Prompt
from kvferry.errors import KvferryError


@dataclass(slots=True)
class Load:
    """A request that decode wants to read.

    Attributes:
        reference: reference of the publication to read.
        until: when its time to read ends, on the scheduler's clock.
        traceparent: of the trace that it belongs to; empty: none.
        prompt: its prompt, once it is to be read and not to follow.
        follows: another request of the same reference is read, and this one waits to find its blocks in vLLM's prefix
            cache; no lease is acquired for it.
        found: it follows, and the blocks are there.
        waits: nothing has changed since vLLM was told to ask again.
        computed: number of tokens that it has already, according to vLLM's last call.
        reading: it has blocks, and the workers are reading into them.
        aborted: vLLM has aborted it.
        failed: its read has failed, and vLLM is being told.
        error: with which the read was refused, or has failed; vLLM is told of both alike, which it can only be after it
            has allocated blocks.
    """

    reference: str = field(repr=False)
    until: float
    traceparent: str = ""
    prompt: Prompt = Prompt.unknown
    follows: bool = False
    found: bool = False
    waits: bool = False
    computed: int = 0
    reading: bool = False
    aborted: bool = False
    failed: bool = False
    error: KvferryError | None = None


class Loads:
    """The loads of an engine by their request_ids, and by their references, of which several requests may have one."""

    def __init__(self) -> None:
        self._by_request: dict[str, Load] = {}
        self._by_reference: dict[str, dict[str, Load]] = {}
        self._leaders: dict[str, str] = {}
        """The request that is read, or that vLLM will find in its prefix cache soon, by its reference."""
        self._led: dict[str, str] = {}
        """The references of those requests."""

    def __len__(self) -> int:
        return len(self._by_request)

    def __getitem__(self, request_id: str) -> Load:
        return self._by_request[request_id]

    def get(self, request_id: str) -> Load | None:
        """Return the load of a request; None: there is none."""
        return self._by_request.get(request_id)

    def add(self, request_id: str, load: Load) -> None:
        """Add the load of a request that has arrived."""
        self._by_request[request_id] = load
        self._by_reference.setdefault(load.reference, {})[request_id] = load

    def pop(self, request_id: str) -> Load:
        """Forget the load of a request, and return it. The request still leads those that follow it."""
        load = self._by_request.pop(request_id)
        others = self._by_reference[load.reference]
        del others[request_id]
        if not others:
            del self._by_reference[load.reference]
        return load

    def any_of(self, reference: str) -> bool:
        """Whether a request has this reference."""
        return reference in self._by_reference

    def lead(self, request_id: str, load: Load) -> None:
        """Let a request be the one of its reference that is read."""
        self._leaders[load.reference] = request_id
        self._led[request_id] = load.reference

    def is_led(self, reference: str) -> bool:
        """Whether a request of this reference is read, or will be in the prefix cache soon."""
        return reference in self._leaders

    def end_lead(self, request_id: str, *, found: bool) -> str:
        """Let the followers of a request go on.

        Args:
            request_id: the request.
            found: its blocks are in the prefix cache.

        Returns:
            Its reference; empty: it has led none.
        """
        reference = self._led.pop(request_id, "")
        if reference:
            del self._leaders[reference]
            for load in self._by_reference.get(reference, {}).values():
                load.found |= found and load.follows
                load.waits = False
        return reference
