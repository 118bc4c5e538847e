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
    """The scheduler's message to every worker.

    Attributes:
        step: number of the step, from 1.
        token: the engine's token, until all workers have registered; then empty. Before, there are no orders for the
            workers' ports.
        starts: grants of the reads to start.
        grant_steps: later steps of the grants' publications.
        cancels: read_ids of the reads to cancel.
        sums: blocks that integrity mode sums.
        received: requests whose reads have ended, with or without an error.
        lost: ids of the blocks of failed reads, in an engine of one group.
        failed: requests whose reads have failed, in an engine of several groups.
        waits: the engine computes nothing, and workers may wait for the ends of their reads.
        asks: the scheduler waits for the end of a step to publish blocks.
    """

    step: int = 0
    token: str = field(default="", repr=False)
    starts: list[Grant] = field(default_factory=list)
    grant_steps: list[GrantStep] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    sums: list[Summed] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    waits: bool = False
    asks: bool = False

    def anon_repr(self) -> str:
        """Return the text that vLLM logs when an engine dies (``vllm/logging_utils/dump_input.py``). Without this
        method, vLLM logs all attributes, also secret ones."""
        return repr(self)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' message to the scheduler.

    vLLM builds the message when a step is queued, and sends it with the step's output. By then the device has computed
    more, usually the step itself. So the message gets its rank's progress as late as possible: when it is pickled, or
    read in the same process.

    Attributes:
        outputs: outputs of the workers' ports.
        registered: ranks whose caches are registered.
        errors: messages of failed registrations, by rank.
        rank: the sender.
        now: returns the progress of the sender's device; None in a message that has arrived.
        steps: the progress of each rank's device when its message was sent.
    """

    outputs: list[WorkerOutput] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)
    rank: int = 0
    now: Callable[[], StepsDone] | None = None
    steps: dict[int, StepsDone] = field(default_factory=dict)

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
