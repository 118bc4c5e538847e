"""An operator's settings of the backend. SGLang has no arguments for them, so they are environment variables, read once
in each process. And SGLang's own settings that the backend does not support."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry import Client, TlsConfig
from kvferry.errors import InvalidField

LAYER_NAMES = "model.layers.{}.self_attn.attn"
"""vLLM's names of the attention layers of most models."""

MOST_SECONDS = 1e8
"""The longest timeout of the SDK, about three years."""

STATES = ("swa",)
"""Supported states that SGLang keeps beside the KV cache and hands over, by `StateType`'s values."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the backend, equal in all processes of an engine: each is the variable ``KVFERRY_`` and its name
    in capitals. Raises `InvalidField`, which names the variable."""

    address: str  # of this node's server, ``unix:/path`` or ``host:port``
    engine_id: str  # empty: made of the host's name and the instance's port
    allowed_homes: tuple[str, ...]  # shell patterns of ``host:port`` of homes that need no TLS
    directory: str  # URL of the directory of homes and engines; empty: none
    read_timeout: float  # seconds until a read fails, the wait for its publication included
    start_timeout: float  # seconds for which the engine waits for its node server
    layer_names: str  # names of the layers, with ``{}`` for their numbers; engines read only layers of the same names
    prompt_check: str  # "compare", "require" or "off": see `Client`
    prefix_share: float  # share of the pages that may be held for engines that have asked for prefixes
    prefix_wait: float  # seconds that a request waits for the answer of an engine that is asked for its prefix
    tls: TlsConfig | None  # of the PEM files TLS_CA, TLS_CERT and TLS_KEY; None: no TLS

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        address = environment.get("KVFERRY_ADDRESS", "")
        if not address:
            raise InvalidField("KVFERRY_ADDRESS", address, "the node server's address, unix:/path or host:port")
        layers = environment.get("KVFERRY_LAYER_NAMES", LAYER_NAMES)
        if layers.count("{}") != 1:
            raise InvalidField("KVFERRY_LAYER_NAMES", layers, "a name with {} in place of the layer's number")
        check = environment.get("KVFERRY_PROMPT_CHECK") or "compare"
        if check not in ("require", "compare", "off"):
            raise InvalidField("KVFERRY_PROMPT_CHECK", check, "require, compare or off")
        homes = environment.get("KVFERRY_ALLOWED_HOMES", "")
        files = {part: environment.get(f"KVFERRY_TLS_{part.upper()}", "") for part in ("ca", "cert", "key")}
        tls = {part: Path(name) for part, name in files.items() if name}
        return cls(
            address=address,
            engine_id=environment.get("KVFERRY_ENGINE_ID", ""),
            allowed_homes=tuple(filter(None, (home.strip() for home in homes.split(",")))),
            directory=environment.get("KVFERRY_DIRECTORY", ""),
            read_timeout=_number(environment, "KVFERRY_READ_TIMEOUT", "120", 0.001, MOST_SECONDS),
            start_timeout=_number(environment, "KVFERRY_START_TIMEOUT", "30", 0.001, MOST_SECONDS),
            layer_names=layers,
            prompt_check=check,
            prefix_share=_number(environment, "KVFERRY_PREFIX_SHARE", "0.25", 0.0, 1.0),
            prefix_wait=_number(environment, "KVFERRY_PREFIX_WAIT", "0.2", 0.001, 2.0),
            tls=TlsConfig(**tls) if tls else None,
        )

    def client(self) -> Client:
        return Client(
            self.address,
            tls=self.tls,
            allowed_homes=self.allowed_homes,
            directory=self.directory or None,
            prompt_check=self.prompt_check,
        )


def check_supported(kv_args: Any, parallel: Any, disagg: Any, memory: Any, draft_pool: Any) -> None:
    """Raise `InvalidField`, which names SGLang's setting, for unsupported settings. `kv_args` are SGLang's arguments of
    the manager; `draft_pool` is None without a draft model."""
    for name, found in (
        ("pp_size", parallel.pp_size),
        ("dp_size", parallel.dp_size),
        ("attn_cp_size", parallel.attn_cp_size),
        ("attn_dcp_size", parallel.attn_dcp_size),
        ("attn_dp_size", parallel.attn_dp_size),
    ):
        if found > 1:
            raise InvalidField(name, found, "1: other ways to divide an engine than tensor parallelism are not built")
    for name, given in (
        ("enable_kv_cache_sharding", parallel.enable_kv_cache_sharding),
        ("enable_unified_memory", memory.enable_unified_memory),
        ("disaggregation_enable_kv_checksum", disagg.disaggregation_enable_kv_checksum),
        ("enable_pd_role_switch", disagg.enable_pd_role_switch),
    ):
        if given:
            raise InvalidField(name, given, "False")
    if draft_pool is not None:
        raise InvalidField("draft model", type(draft_pool).__name__, "none: its cache is not handed over")
    states = [state.value for state in kv_args.state_types if state.value not in STATES]
    if states:
        raise InvalidField("state beside the KV cache", states, f"one of {STATES}")


def _number(environment: Mapping[str, str], name: str, default: str, least: float, most: float) -> float:
    text = environment.get(name) or default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise InvalidField(name, text, f"a number from {least:g} to {most:g}")
    return found
