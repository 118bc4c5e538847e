"""kvferry moves the KV cache of LLM requests between inference engines.

The tour: `Client` is a process's way to its node server. A rank offers its memory with `Client.register_cache`; the
source publishes a request's blocks with `EngineSession.publish` and gives the router a reference; the destination reads
them with `Cache.read` and gets a `Read`, which can be awaited, polled and cancelled. `kvferry.aio.AsyncClient` is the
same for event loops, `serve` a node server inside this process. `kvferry.geometry` says what a cache is, `kvferry.plan`
who reads what from whom, `kvferry.errors` what can go wrong.

Names are loaded on first use: importing kvferry imports neither torch nor NIXL nor gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.aio import AsyncClient as AsyncClient
    from kvferry.blocks import Blocks as Blocks
    from kvferry.cache import Cache as Cache
    from kvferry.channel import TlsConfig as TlsConfig
    from kvferry.client import Client as Client
    from kvferry.compat import diff as diff
    from kvferry.embed import serve as serve
    from kvferry.errors import KvferryError as KvferryError
    from kvferry.geometry import EngineGeometry as EngineGeometry
    from kvferry.geometry import Group as Group
    from kvferry.geometry import GroupKind as GroupKind
    from kvferry.geometry import Interval as Interval
    from kvferry.geometry import MemoryKind as MemoryKind
    from kvferry.geometry import MemoryRegion as MemoryRegion
    from kvferry.geometry import Plane as Plane
    from kvferry.geometry import RankGeometry as RankGeometry
    from kvferry.geometry import TokenShard as TokenShard
    from kvferry.integrity import IntegrityOptions as IntegrityOptions
    from kvferry.integrity import Verification as Verification
    from kvferry.nixl_options import NixlOptions as NixlOptions
    from kvferry.paths import Costs as Costs
    from kvferry.paths import PathRule as PathRule
    from kvferry.plan import ReadPlan as ReadPlan
    from kvferry.plan import plan_read as plan_read
    from kvferry.read import Read as Read
    from kvferry.read import ReadProgress as ReadProgress
    from kvferry.read import ReadResult as ReadResult
    from kvferry.read import ReadState as ReadState
    from kvferry.session import EngineSession as EngineSession
    from kvferry.session import Publication as Publication
    from kvferry.session import Release as Release
    from kvferry.session import ReleaseOutcome as ReleaseOutcome
    from kvferry.spec import EngineSpec as EngineSpec
    from kvferry.spec import EngineToken as EngineToken
    from kvferry.staging import StagingOptions as StagingOptions

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncClient": "aio",
    "Blocks": "blocks",
    "Cache": "cache",
    "Client": "client",
    "Costs": "paths",
    "EngineGeometry": "geometry",
    "EngineSession": "session",
    "EngineSpec": "spec",
    "EngineToken": "spec",
    "Group": "geometry",
    "GroupKind": "geometry",
    "IntegrityOptions": "integrity",
    "Interval": "geometry",
    "KvferryError": "errors",
    "MemoryKind": "geometry",
    "MemoryRegion": "geometry",
    "NixlOptions": "nixl_options",
    "PathRule": "paths",
    "Plane": "geometry",
    "Publication": "session",
    "RankGeometry": "geometry",
    "Read": "read",
    "ReadPlan": "plan",
    "ReadProgress": "read",
    "ReadResult": "read",
    "ReadState": "read",
    "Release": "session",
    "ReleaseOutcome": "session",
    "StagingOptions": "staging",
    "TlsConfig": "channel",
    "TokenShard": "geometry",
    "Verification": "integrity",
    "diff": "compat",
    "plan_read": "plan",
    "serve": "embed",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    value = getattr(import_module(f"kvferry.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
