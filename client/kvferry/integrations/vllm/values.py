"""What passes between the connector's two halves, by vLLM's own messages of each step; they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.engine import Grant, WorkerOutput


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker.

    Attributes:
        token: of the engine's session, until all workers have registered.
        starts: reads to start.
        cancels: read_ids to stop.
        sent: requests whose blocks the source may free.
        received: requests whose reads have ended, well or not.
        lost: blocks of these that hold nothing, in an engine of one group.
        failed: those of them that hold nothing, in an engine of several.
    """

    token: str = field(default="", repr=False)
    starts: list[Grant] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether any worker has to hear of it."""
        return bool(self.token or self.starts or self.cancels or self.sent or self.received)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler.

    Attributes:
        outputs: what happened, of one worker each.
        registered: ranks whose caches are registered.
        errors: why a rank's cannot be.
    """

    outputs: list[WorkerOutput] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Of several workers, together."""
        return WorkerNews(
            self.outputs + other.outputs, self.registered | other.registered, {**self.errors, **other.errors}
        )
