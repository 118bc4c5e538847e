"""The connector in each of vLLM's worker processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvferry._client import Client
from kvferry._threads import start_thread
from kvferry.engine import RankEnd, WorkerOutput, WorkerPort
from kvferry.errors import KvferryError
from kvferry.geometry.model import Plane
from kvferry.geometry.tensors import Tensor
from kvferry.integrations.vllm.device import EVERY_STEP, DeviceSteps, steps_of
from kvferry.integrations.vllm.setup import Setup
from kvferry.integrations.vllm.values import StepMetadata, WorkerNews

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Shortest seconds until a failed registration is repeated."""


class ConnectorWorker:
    """Registers a rank's caches, and reads into them.

    vLLM makes the workers' connectors before the scheduler's, which opens the engine's session. So the token comes with
    the first step, and the caches are registered on a thread while steps run.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        self._setup = setup
        self._rank = rank
        self._client = Client(setup.address, allowed_homes=setup.allowed_homes)
        self._caches: Mapping[str, Tensor] = {}
        self._planes: Sequence[Plane] = ()
        self._lock = threading.Lock()
        self._registering = False
        self._news = WorkerNews()
        self._steps = DeviceSteps(None)
        self._told = 0
        """The last computed step that the scheduler was told of, at least."""
        self._port: WorkerPort | None = None
        self._early: list[StepMetadata] = []

    def has_caches(self, kv_caches: Mapping[str, Tensor], planes: Sequence[Plane]) -> None:
        """Set the caches of this rank. Called before the first step."""
        self._caches, self._planes = kv_caches, planes
        self._steps = steps_of(kv_caches.values())

    def step(self, metadata: StepMetadata) -> None:
        """Start and cancel reads as the scheduler's message says. Returns at once."""
        self._steps.begun(metadata.step)
        with self._lock:
            if metadata.token and not self._registering:
                try:
                    start_thread(partial(self._register, metadata.token), "kvferry-register")
                    self._registering = True
                except KvferryError as error:
                    # The token comes again with the next step.
                    logger.warning("rank %d is not registered yet: %s", self._rank, error)
            if self._port is None:
                if metadata.starts or metadata.cancels:
                    self._early.append(metadata)
                return
            self._do(self._port, metadata)

    def queued(self, step: int) -> None:
        """Note that all of a step is queued on the device. Returns at once."""
        self._steps.queued(step)

    def news(self) -> WorkerNews | None:
        """Return what has happened since the last call; None: nothing."""
        with self._lock:
            news, self._news = self._news, WorkerNews()
            if self._port is not None:
                output = self._port.finished()
                if output:
                    news.outputs.append(output)
        if self._told < EVERY_STEP:
            # Asked again when the message is sent, so it may then say more than it does now.
            self._told = self._steps.computed()
            news.rank, news.now = self._rank, self._steps.computed
        return news if news.outputs or news.registered or news.errors or news.now else None

    def close(self) -> None:
        """Close the port and the client."""
        if self._port is not None:
            self._port.close()
        self._client.close()

    def _do(self, port: WorkerPort, metadata: StepMetadata) -> None:
        for grant in metadata.starts:
            try:
                port.start(grant)
            except KvferryError as error:
                end = RankEnd(
                    read_id=grant.read_id,
                    request_id=grant.request_id,
                    ok=False,
                    quiet=True,
                    bytes=0,
                    error_name=type(error).__name__,
                    message=error.message,
                    values=dict(error.values),
                )
                self._news.outputs.append(WorkerOutput(self._rank, failed=(end,)))
        for read_id in metadata.cancels:
            port.cancel(read_id)

    def _register(self, token: str) -> None:
        """Register the caches, on a thread of its own; repeats it while errors are retryable."""
        while True:
            try:
                port = WorkerPort(self._client, self._setup.spec, self._rank, token=token)
                # `planes` declare the heads of each rank. A plane with a whole axis is either latent, and equal on all
                # ranks, or the only one of its pipeline stage.
                port.register(self._caches, planes=self._planes, replicated=True, serve=self._setup.serves)
            except KvferryError as error:
                if error.retryable:
                    logger.warning("rank %d is not registered yet: %s", self._rank, error)
                    time.sleep(max(AGAIN, error.retry_after or 0.0))
                    continue
                with self._lock:
                    self._news.errors[self._rank] = str(error)
                return
            except Exception as error:
                logger.exception("rank %d could not be registered", self._rank)
                with self._lock:
                    self._news.errors[self._rank] = repr(error)
                return
            break
        if self._setup.reads:
            # Optional: it makes the first read faster.
            with suppress(KvferryError):
                port.prepare()
        with self._lock:
            self._port = port
            self._news.registered.add(self._rank)
            for metadata in self._early:
                self._do(port, metadata)
            self._early.clear()
