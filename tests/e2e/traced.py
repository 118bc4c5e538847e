"""One engine of a traced request: a source or a destination, with a scheduler and a worker.

Run by `test_tracing.py`, with its role, the address of a node server, and the URL of a collector; without one it does
not trace. It is told of a request in a line of JSON, and answers in one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import kvferry
from kvferry import Blocks, EngineSpec, Group
from kvferry.engine import SchedulerPort, WorkerPort
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")


def trace(endpoint: str, name: str) -> Any:
    """Set tracing up like an application; return the provider to shut down at the end."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from kvferry.integrations import otel

    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    otel.trace(provider)
    return provider


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(role: str, address: str, endpoint: str) -> None:
    provider = trace(endpoint, role) if endpoint else None
    spec = EngineSpec(role, (Group("full", block_tokens=4, num_blocks=16),))
    memory = np.full((2, 16, 2, 4, 8), 7 if role == "prefill" else 0, np.uint16)
    with kvferry.Client(address) as client:
        scheduler, worker = SchedulerPort(client, spec), WorkerPort(client, spec)
        worker.register({"layer": memory}, axes=AXES, heads=range(2), total_heads=2)
        say(ready=True)
        asked = json.loads(sys.stdin.readline())
        blocks = {"full": Blocks([3, 1], end_token=8)}
        if role == "prefill":
            made = scheduler.publish("cmpl-1", blocks, traceparent=asked["traceparent"])
            say(reference=made.reference, traceparent=made.traceparent)
            until(lambda: bool(scheduler.released()))
        else:
            scheduler.acquire("cmpl-1", asked["reference"], traceparent=asked["traceparent"])
            until(lambda: scheduler.granted("cmpl-1") is not None)
            grant = scheduler.attach("cmpl-1", blocks)
            # As it travels to a worker in another process.
            worker.start(grant)
            ends: list[Any] = []

            def ended() -> bool:
                scheduler.collect(worker.finished())
                ends.extend(scheduler.finished().reads)
                return bool(ends)

            until(ended)
            say(error=str(ends[0].error), right=bool((memory[:, [3, 1]] == 7).all()))
        scheduler.close()
    if provider is not None:
        provider.shutdown()
    say(imported=sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry"))


if __name__ == "__main__":
    main(*sys.argv[1:])
