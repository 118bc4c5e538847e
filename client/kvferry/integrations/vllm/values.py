"""Messages between the connector's scheduler and its workers. vLLM pickles them and sends them with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.engine import Grant, WorkerOutput
from kvferry.geometry.blocks import Blocks


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every worker.

    Attributes:
        token: the engine's token, until all workers have registered; then empty.
        starts: grants of the reads to start.
        cancels: read_ids of the reads to cancel.
        sums: number and blocks of publications that integrity mode sums.
        sent: requests whose blocks the source may free.
        received: requests whose reads have ended, with or without an error.
        lost: ids of the blocks of failed reads, in an engine of one group.
        failed: requests whose reads have failed, in an engine of several groups.
    """

    token: str = field(default="", repr=False)
    starts: list[Grant] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    sums: list[tuple[int, dict[str, Blocks]]] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether the message has any content."""
        return bool(self.token or self.starts or self.cancels or self.sums or self.sent or self.received)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' message to the scheduler.

    Attributes:
        outputs: outputs of the workers' ports.
        registered: ranks whose caches are registered.
        errors: messages of the errors with which ranks could not be registered, by rank.
    """

    outputs: list[WorkerOutput] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Combine the news of several workers."""
        return WorkerNews(
            self.outputs + other.outputs, self.registered | other.registered, {**self.errors, **other.errors}
        )
