"""kvferry moves the KV cache of LLM requests between inference engines.

A process makes a `Client` to talk to its node server. Each rank registers its memory with `Client.register_cache`. The
source publishes a request's blocks with `EngineSession.publish`, and gives the router a reference. The destination
reads them with `Cache.read` and gets a `Read`, which can be awaited, polled and cancelled. `kvferry.aio.AsyncClient` is
the same for event loops, and `serve` runs a node server inside this process. `kvferry.geometry` describes caches,
`kvferry.planner` plans which rank reads which bytes from where, and `kvferry.errors` has the exceptions.

Names and modules are loaded on first use: importing kvferry imports neither torch nor NIXL nor gRPC.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry import aio as aio
    from kvferry import engine as engine
    from kvferry import errors as errors
    from kvferry import geometry as geometry
    from kvferry import host_memory as host_memory
    from kvferry import integrations as integrations
    from kvferry import planner as planner
    from kvferry import stats as stats
    from kvferry import testing as testing
    from kvferry._cache import Cache as Cache
    from kvferry._client import Client as Client
    from kvferry._control.publications import Publication as Publication
    from kvferry._control.publications import ReadSummary as ReadSummary
    from kvferry._control.publications import Release as Release
    from kvferry._control.questions import Question as Question
    from kvferry._directory.directory import Directory as Directory
    from kvferry._directory.directory import Listed as Listed
    from kvferry._directory.directory import Listing as Listing
    from kvferry._directory.opening import open_directory as open_directory
    from kvferry._embed import EmbeddedServer as EmbeddedServer
    from kvferry._embed import ServerSettings as ServerSettings
    from kvferry._embed import serve as serve
    from kvferry._engine_spec import EngineSpec as EngineSpec
    from kvferry._integrity.summed_blocks import IntegrityOptions as IntegrityOptions
    from kvferry._integrity.summed_blocks import Verification as Verification
    from kvferry._prompt import Prompt as Prompt
    from kvferry._prompt import PromptInput as PromptInput
    from kvferry._reads.cache_reads import Read as Read
    from kvferry._reads.cache_reads import ReadProgress as ReadProgress
    from kvferry._reads.cache_reads import ReadResult as ReadResult
    from kvferry._reads.cache_reads import ReadState as ReadState
    from kvferry._session import EngineSession as EngineSession
    from kvferry._transport.nixl_options import NixlOptions as NixlOptions
    from kvferry._transport.staging_pool import StagingOptions as StagingOptions
    from kvferry._wire.channel import TlsConfig as TlsConfig
    from kvferry._wire.channel import parse_address as parse_address
    from kvferry._wire.outcomes import MissReason as MissReason
    from kvferry._wire.outcomes import ReleaseOutcome as ReleaseOutcome
    from kvferry._wire.reference import parse_reference as parse_reference
    from kvferry._wire.reference import router_reference as router_reference
    from kvferry._wire.token import EngineToken as EngineToken
    from kvferry.aio import AsyncClient as AsyncClient
    from kvferry.engine import SchedulerPort as SchedulerPort
    from kvferry.engine import WorkerPort as WorkerPort
    from kvferry.errors import KvferryError as KvferryError
    from kvferry.geometry import Blocks as Blocks
    from kvferry.geometry import EngineGeometry as EngineGeometry
    from kvferry.geometry import Group as Group
    from kvferry.geometry import GroupKind as GroupKind
    from kvferry.geometry import Interval as Interval
    from kvferry.geometry import MemoryKind as MemoryKind
    from kvferry.geometry import MemoryRegion as MemoryRegion
    from kvferry.geometry import Plane as Plane
    from kvferry.geometry import RankGeometry as RankGeometry
    from kvferry.geometry import TokenShard as TokenShard
    from kvferry.geometry import shard as shard
    from kvferry.geometry.tensors import Holding as Holding
    from kvferry.geometry.tensors import TensorView as TensorView
    from kvferry.planner import Costs as Costs
    from kvferry.planner import PathRule as PathRule
    from kvferry.planner import ReadPlan as ReadPlan
    from kvferry.planner import diff as diff
    from kvferry.planner import plan_read as plan_read

__version__ = "0.2.0"

_NAMES = {
    "_cache": ("Cache",),
    "_client": ("Client",),
    "_control.publications": ("Publication", "ReadSummary", "Release"),
    "_control.questions": ("Question",),
    "_directory.directory": ("Directory", "Listed", "Listing"),
    "_directory.opening": ("open_directory",),
    "_embed": ("EmbeddedServer", "ServerSettings", "serve"),
    "_engine_spec": ("EngineSpec",),
    "_integrity.summed_blocks": ("IntegrityOptions", "Verification"),
    "_prompt": ("Prompt", "PromptInput"),
    "_reads.cache_reads": ("Read", "ReadProgress", "ReadResult", "ReadState"),
    "_session": ("EngineSession",),
    "_transport.nixl_options": ("NixlOptions",),
    "_transport.staging_pool": ("StagingOptions",),
    "_wire.channel": ("TlsConfig", "parse_address"),
    "_wire.outcomes": ("MissReason", "ReleaseOutcome"),
    "_wire.reference": ("parse_reference", "router_reference"),
    "_wire.token": ("EngineToken",),
    "aio": ("AsyncClient",),
    "engine": ("SchedulerPort", "WorkerPort"),
    "errors": ("KvferryError",),
    "geometry.blocks": ("Blocks",),
    "geometry.model": ("EngineGeometry", "Group", "GroupKind", "MemoryRegion", "RankGeometry"),
    "geometry.plane": ("Interval", "MemoryKind", "Plane", "TokenShard", "shard"),
    "geometry.tensors": ("Holding", "TensorView"),
    "planner": ("Costs", "PathRule", "ReadPlan", "diff", "plan_read"),
}
_HOME_OF = {name: module for module, names in _NAMES.items() for name in names}

_MODULES = ("aio", "engine", "errors", "geometry", "host_memory", "integrations", "planner", "stats", "testing")

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"kvferry.{name}")
    if name not in _HOME_OF:
        # With both arguments Python adds "Did you mean".
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(import_module(f"kvferry.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
