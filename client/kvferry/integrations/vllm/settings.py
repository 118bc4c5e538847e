"""An operator's settings in ``kv_connector_extra_config``: checked when vLLM starts, before it loads a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from vllm.version import __version__

from kvferry import Client, IntegrityOptions, NixlOptions, StagingOptions, TlsConfig
from kvferry.errors import InvalidField
from kvferry.integrations.settings import PrefixShare, PrefixWait, Seconds, made, shown

ADDRESS_VARIABLE = "KVFERRY_ADDRESS"
"""The environment variable with the node server's address, for fleets whose engines share one configuration."""

OF_NIXL_CONNECTOR = {
    "backends": "no such list: leave it out, or see nixl",
    "num_threads": "nixl: {reading_agents: ...}",
    "kv_lease_duration": "a time of the node server's: kvferryd --ttl",
    "engine_ttl": "nothing: idle peers are dropped by themselves",
    "bidirectional_kv_xfer": "role: both",
    "decoder_kv_blocks_ttl": "a time of the node server's: kvferryd --hold",
    "kv_recompute_threshold": "nothing: what is published is read",
    "enforce_handshake_compat": "nothing: caches that differ are always refused, naming the fields",
    "enable_cross_layers_blocks": "nothing: strides are taken from the tensors",
    "push_registration_timeout": "read_timeout",
}
"""Keys of vLLM's NixlConnector (0.32.0), and kvferry's replacements."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""An engine's role by vLLM's ``kv_role``, unless the operator sets a role."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class ConnectorSettings:
    """The settings of the connector, equal in all processes of an engine; docs/vllm.md explains each. The objects are
    those of `Client`, written as JSON objects with the same fields; files are paths."""

    address: str
    role: Literal["prefill", "decode", "both"] | None = None
    allowed_homes: tuple[str, ...] = ()
    directory: str = ""
    home_in_references: bool = True
    read_timeout: Seconds = 120.0
    start_timeout: Seconds = 30.0
    prefix_share: PrefixShare = 0.25
    prefix_wait: PrefixWait = 0.2
    tls: TlsConfig | None = None
    nixl: NixlOptions = field(default_factory=NixlOptions)
    staging: StagingOptions = field(default_factory=StagingOptions)
    integrity: IntegrityOptions = field(default_factory=IntegrityOptions)
    prompt_check: str = "compare"
    optimistic: bool = True
    traces: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            expected = f"the node server's address, in kv_connector_extra_config or {ADDRESS_VARIABLE}"
            raise InvalidField("address", "", expected)

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> ConnectorSettings:
        """Convert ``kv_connector_extra_config``. Errors as `made`."""
        given = {str(key): value for key, value in extra.items()}
        for key in given.keys() & OF_NIXL_CONNECTOR.keys():
            raise InvalidField(key, shown(given[key]), f"no key of NixlConnector; kvferry has {OF_NIXL_CONNECTOR[key]}")
        given["address"] = given.get("address") or os.environ.get(ADDRESS_VARIABLE, "")
        return made(cls, given)

    def role_of(self, kv_role: str) -> str:
        """Return the engine's role: "prefill", "decode" or "both". Raises `InvalidField`: the engine would read, and is
        not a consumer to vLLM, which would then reuse blocks to which a running step still writes: the step would
        overwrite the bytes of a read."""
        if self.role in ("decode", "both") and kv_role == "kv_producer":
            why = "only of consumers does vLLM keep blocks back until steps that write to them have ended"
            raise InvalidField("role", self.role, f"prefill, because kv_role is kv_producer: {why}")
        return self.role or ROLES[kv_role]

    def client(self) -> Client:
        """Make the client of a process; raises `InvalidField` if `traces` is set and OpenTelemetry is missing."""
        if self.traces:
            try:
                from kvferry.integrations import otel
            except ModuleNotFoundError as error:
                raise InvalidField("traces", True, f"{error.name}, from: pip install 'kvferry[otel]'") from None
            otel.trace()
        return Client(
            self.address,
            tls=self.tls,
            allowed_homes=self.allowed_homes,
            directory=self.directory,
            home_in_references=self.home_in_references,
            options=self.nixl,
            staging=self.staging,
            integrity=self.integrity,
            prompt_check=self.prompt_check,
            optimistic=self.optimistic,
        )


def check_supported(vllm_config: Any, device_type: str) -> None:
    """Raise `InvalidField`, which names vLLM's setting and the reason, for unsupported settings. `device_type` is the
    type of the cache's device, as vLLM's platform names it: ``cpu``, ``cuda``, ``xpu``."""
    if not hasattr(vllm_config, "aux_output_config"):
        raise InvalidField("version of vLLM", __version__, "0.31.0 or newer")
    buffer = vllm_config.kv_transfer_config.kv_buffer_device
    if buffer != device_type:
        expected = f"{device_type!r}, or nothing: the cache is read where it is, and no copy is made in a buffer"
        raise InvalidField("kv_buffer_device", buffer, f"{expected} elsewhere")
    if vllm_config.aux_output_config.enable_return_routed_experts:
        expected = "False: decode does not compute the prompt, so it cannot say which experts did"
        raise InvalidField("enable_return_routed_experts", True, f"{expected}, and they are not published")
    model = vllm_config.model_config
    if model is None:
        return
    if model.runner_type == "pooling":
        expected = "generate: models for embeddings, scores and classes decode nothing, so nobody reads"
        raise InvalidField("runner", "pooling", expected)
    if model.enable_sleep_mode:
        raise InvalidField("enable_sleep_mode", True, "False: a sleeping engine unmaps memory that others read")
    if model.is_encoder_decoder:
        expected = "a decoder: caches of cross-attention are not published (nor does vLLM allow it)"
        raise InvalidField("model", str(model.model), expected)
