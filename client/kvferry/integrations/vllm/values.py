"""Messages between the connector's scheduler and its workers. vLLM pickles them and sends them with each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.engine import Grant, GrantStep, WorkerOutput
from kvferry.geometry.blocks import Blocks


class StepsDone(NamedTuple):
    """The progress of a rank's device: the last step of which it has computed all kernels so far, and the last that is
    also queued as a whole, never one that vLLM has only begun; with all earlier steps."""

    computed: int
    ended: int


class Summed(NamedTuple):
    """Published blocks for the sums of integrity mode: number of the publication, blocks, whether they are the last."""

    publication: int
    blocks: Mapping[str, Blocks]
    last: bool = True


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every worker."""

    step: int = 0  # from 1
    token: str = field(default="", repr=False)
    """The engine's token, until all workers have registered; then empty. Before, there are no orders for the workers'
    ports."""
    starts: list[Grant] = field(default_factory=list)  # of the reads to start
    grant_steps: list[GrantStep] = field(default_factory=list)  # later steps of the grants' publications
    cancels: list[str] = field(default_factory=list)  # read_ids of the reads to cancel
    sums: list[Summed] = field(default_factory=list)  # blocks that integrity mode sums
    received: set[str] = field(default_factory=set)  # requests whose reads have ended, with or without an error
    lost: set[int] = field(default_factory=set)  # ids of the blocks of failed reads, in an engine of one group
    failed: set[str] = field(default_factory=set)  # requests whose reads have failed, in an engine of several groups
    waits: bool = False  # the engine computes nothing, and workers may wait for the ends of their reads
    asks: bool = False  # the scheduler waits for the end of a step to publish blocks

    def anon_repr(self) -> str:
        """Return the text that vLLM logs when an engine dies (``vllm/logging_utils/dump_input.py``). Without this
        method, vLLM logs all attributes, also secret ones."""
        return repr(self)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' message to the scheduler. vLLM builds it when a step is queued, and sends it with the step's output.
    By then the device has computed more, usually the step itself. So the message gets its rank's progress as late as
    possible: when it is pickled, or read in the same process."""

    outputs: list[WorkerOutput] = field(default_factory=list)  # of the workers' ports
    registered: set[int] = field(default_factory=set)  # ranks whose caches are registered
    errors: dict[int, str] = field(default_factory=dict)  # messages of failed registrations, by rank
    rank: int = 0  # the sender
    now: Callable[[], StepsDone] | None = None  # the sender's progress; None in a message that has arrived
    steps: dict[int, StepsDone] = field(default_factory=dict)  # of each rank, when its message was sent

    def done(self) -> dict[int, StepsDone]:
        """Return the progress of each rank's device."""
        return self.steps if self.now is None else {**self.steps, self.rank: self.now()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "now": None, "steps": self.done()}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        return WorkerNews(
            self.outputs + other.outputs,
            self.registered | other.registered,
            {**self.errors, **other.errors},
            steps={**self.done(), **other.done()},
        )
