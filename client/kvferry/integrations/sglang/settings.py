"""An operator's settings of the backend. SGLang has no arguments for them, so they are environment variables, read once
in each process. And SGLang's own settings that the backend does not support."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kvferry import Client, TlsConfig
from kvferry.errors import InvalidField
from kvferry.integrations.settings import PrefixShare, PrefixWait, Seconds, made

LAYER_NAMES = "model.layers.{}.self_attn.attn"
"""vLLM's names of the attention layers of most models."""

STATES = ("swa",)
"""Supported states that SGLang keeps beside the KV cache and hands over, by `StateType`'s values."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the backend, equal in all processes of an engine: each is the variable ``KVFERRY_`` and its name
    in capitals. Raises `InvalidField`, which names the variable."""

    address: str  # of this node's server, ``unix:/path`` or ``host:port``
    engine_id: str = ""  # empty: made of the host's name and the instance's port
    allowed_homes: str = ""  # shell patterns of ``host:port`` of homes that need no TLS, with commas between them
    directory: str = ""  # URL of the directory of homes and engines; empty: none
    read_timeout: Seconds = 120.0  # until a read fails, the wait for its publication included
    start_timeout: Seconds = 30.0  # for which the engine waits for its node server
    # Names of the layers, with ``{}`` for their numbers; engines read only layers of the same names.
    layer_names: str = LAYER_NAMES
    prompt_check: Literal["compare", "require", "off"] = "compare"  # see `Client`
    prefix_share: PrefixShare = 0.25  # of the pages that may be held for engines that have asked for prefixes
    prefix_wait: PrefixWait = 0.2  # seconds that a request waits for an engine that is asked for its prefix
    tls_ca: Path | None = None  # PEM files; none: no TLS
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^{}]*\{\}[^{}]*", self.layer_names):
            expected = f"the name of a layer, with {{}} for its number, such as {LAYER_NAMES}"
            raise InvalidField("layer_names", self.layer_names, expected)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        named = {each.name: environment.get(f"KVFERRY_{each.name.upper()}", "") for each in fields(cls)}
        if not named["address"]:
            raise InvalidField("KVFERRY_ADDRESS", "", "the node server's address, unix:/path or host:port")
        try:
            return made(cls, {name: text for name, text in named.items() if text}, text=True)
        except InvalidField as error:
            name = f"KVFERRY_{error.values['field'].upper()}"
            raise InvalidField(name, environment.get(name, ""), error.values["expected"]) from None

    def client(self) -> Client:
        files = self.tls_ca, self.tls_cert, self.tls_key
        return Client(
            self.address,
            tls=TlsConfig(*files) if any(files) else None,
            allowed_homes=[home.strip() for home in self.allowed_homes.split(",") if home.strip()],
            directory=self.directory or None,
            prompt_check=self.prompt_check,
        )


def check_supported(kv_args: Any, parallel: Any, disagg: Any, memory: Any, features: Any, draft_pool: Any) -> None:
    """Raise `InvalidField`, which names SGLang's setting, for unsupported settings. `kv_args` are SGLang's arguments of
    the manager; `draft_pool` is None without a draft model."""
    for name in ("pp_size", "dp_size", "attn_cp_size", "attn_dcp_size", "attn_dp_size"):
        if (found := getattr(parallel, name)) > 1:
            raise InvalidField(name, found, "1: other ways to divide an engine than tensor parallelism are not built")
    for name, given in (
        ("enable_kv_cache_sharding", parallel.enable_kv_cache_sharding),
        ("enable_unified_memory", memory.enable_unified_memory),
        ("enable_memory_saver", features.enable_memory_saver),  # Unmaps memory that others read
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
