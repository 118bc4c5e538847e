"""An operator's settings in ``kv_connector_extra_config``: checked when vLLM starts, before it loads a model."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvferry import Client, IntegrityOptions, NixlOptions, StagingOptions, TlsConfig
from kvferry.errors import InvalidField
from kvferry.integrations.vllm.versions import returns_routed_experts

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

MOST_SECONDS = 1e8
"""The longest timeout of the SDK, about three years."""

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings of the connector, equal in all processes of an engine.

    The objects are those of `Client`, written as JSON objects with the same fields; files are paths.

    Attributes:
        address: address of this node's server, ``unix:/path`` or ``host:port``; otherwise from ``KVFERRY_ADDRESS``.
        role: "prefill": others read from the engine; "decode": it reads from others; "both"; None: by vLLM's
            ``kv_role``.
        allowed_homes: shell patterns of the ``host:port`` of homes to which clients may connect without TLS.
        directory: URL of the directory of homes and engines; empty: none.
        home_in_references: whether references carry the address of the home.
        read_timeout: seconds until a read fails, the wait for its publication included.
        start_timeout: seconds for which the engine waits for its node server when it starts.
        max_waiting: number of requests whose publications are asked for at once at each prefill engine's home; further
            requests wait for their turn.
        prefix_share: share of the cache's blocks that may be held for engines that have asked for prefixes; 0: none.
        prefix_wait: seconds for which a request waits for the answer of an engine that is asked for its prefix.
        tls: files for TLS; None: no TLS.
        nixl: how bytes move.
        staging: when and how small pieces go through staging memory.
        integrity: whether published blocks are summed, and read blocks are compared with the sums.
        prompt_check, optimistic: see `Client`.
        self_check: whether each rank checks at its start that vLLM writes where the planes declare. If False, only
            layouts that the tests have proven are served.
        traces: whether to record the spans of reads with OpenTelemetry, by the tracer provider of each process: see
            `kvferry.integrations.otel`.
    """

    address: str
    role: str | None = None
    allowed_homes: tuple[str, ...] = ()
    directory: str = ""
    home_in_references: bool = True
    read_timeout: float = 120.0
    start_timeout: float = 30.0
    max_waiting: int = 256
    prefix_share: float = 0.25
    prefix_wait: float = 0.2
    tls: TlsConfig | None = None
    nixl: NixlOptions = field(default_factory=NixlOptions)
    staging: StagingOptions = field(default_factory=StagingOptions)
    integrity: IntegrityOptions = field(default_factory=IntegrityOptions)
    prompt_check: str = "compare"
    optimistic: bool = True
    self_check: bool = True
    traces: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            raise InvalidField(
                "address", "", f"the node server's address, in kv_connector_extra_config or {ADDRESS_VARIABLE}"
            )
        if self.role is not None and self.role not in ROLES.values():
            raise InvalidField("role", shown(self.role), "prefill, decode or both")
        # The client checks the other settings.
        for name in ("self_check", "traces"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidField(name, shown(getattr(self, name)), "true or false")
        for name in ("read_timeout", "start_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_SECONDS:
                raise InvalidField(name, shown(value), f"more than 0 to {MOST_SECONDS:.0e} seconds")
        waiting = self.max_waiting
        if isinstance(waiting, bool) or not isinstance(waiting, int) or waiting < 1:
            raise InvalidField("max_waiting", shown(waiting), "an integer of at least 1")
        for name, least, most in (("prefix_share", 0.0, 1.0), ("prefix_wait", 0.001, 2.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidField(name, shown(value), f"{least:g} to {most:g}")

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> ConnectorSettings:
        """Convert ``kv_connector_extra_config``.

        Raises:
            InvalidField: a key is unknown, or a value is wrong; `field` is the key, with dots inside objects.
        """
        given = dict(extra)
        if not given.get("address"):
            given["address"] = os.environ.get(ADDRESS_VARIABLE, "")
        return _made(cls, "", given)

    def role_of(self, kv_role: str) -> str:
        """Return the engine's role: "prefill", "decode" or "both".

        Raises:
            InvalidField: the engine would read, and is not a consumer to vLLM. vLLM would then reuse blocks to which a
                running step still writes, and the step would overwrite the bytes of a read.
        """
        if self.role in ("decode", "both") and kv_role == "kv_producer":
            raise InvalidField(
                "role",
                self.role,
                "prefill, because kv_role is kv_producer: only of consumers does vLLM keep blocks back until steps that"
                " write to them have ended",
            )
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
    buffer = vllm_config.kv_transfer_config.kv_buffer_device
    if buffer != device_type:
        raise InvalidField(
            "kv_buffer_device",
            buffer,
            f"{device_type!r}, or nothing: the cache is read where it is, and no copy is made in a buffer elsewhere",
        )
    if returns_routed_experts(vllm_config):
        raise InvalidField(
            "enable_return_routed_experts",
            True,
            "False: decode does not compute the prompt, so it cannot say which experts did, and they are not published",
        )
    model = vllm_config.model_config
    if model is None:
        return
    if model.runner_type == "pooling":
        raise InvalidField(
            "runner", "pooling", "generate: models for embeddings, scores and classes decode nothing, so nobody reads"
        )
    if model.enable_sleep_mode:
        raise InvalidField("enable_sleep_mode", True, "False: a sleeping engine unmaps memory that others read")
    if model.is_encoder_decoder:
        raise InvalidField(
            "model", str(model.model), "a decoder: caches of cross-attention are not published (nor does vLLM allow it)"
        )


def _made(cls: type[Options], path: str, given: Mapping[str, object]) -> Options:
    """Make a dataclass of options from a JSON object at `path`, which ends with a dot; empty for the whole."""
    hints = get_type_hints(cls)
    known = [each.name for each in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise InvalidField(f"{path}{key}", shown(given[key]), _instead(str(key), known, top=not path))
    values = {key: _value(f"{path}{key}", hints[key], value) for key, value in given.items()}
    try:
        return cls(**values)
    except InvalidField as error:
        raise InvalidField(
            f"{path}{error.values['field']}", _Said(error.values["value"]), error.values["expected"]
        ) from None
    except TypeError:
        raise InvalidField(path.rstrip("."), shown(given), f"values of the types of {cls.__name__}") from None


def _value(path: str, hint: object, value: object) -> object:
    """Convert a JSON value to the options' types: objects to options, and names of files to paths."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise InvalidField(path, shown(value), f"an object with the fields of {kind.__name__}")
            return _made(kind, f"{path}.", value)
        if kind is Path:
            if not isinstance(value, str):
                raise InvalidField(path, shown(value), "the name of a file")
            if "\n" in value or value.startswith("-----BEGIN"):
                # Perhaps the key itself: the error of opening such a file would log the key as the name.
                raise InvalidField(path, str, "the name of a file, not what is in it")
            return Path(value)
    return tuple(value) if isinstance(value, list) else value


def shown(value: object) -> object:
    """Return a number or short string as it is, and the type of any other value, for errors."""
    short = value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 80)
    return value if short else type(value)


def _instead(key: str, known: Iterable[str], *, top: bool) -> str:
    """Return the text of an error about an unknown key: a likely replacement, or all keys."""
    known = sorted(known)
    if top and key in OF_NIXL_CONNECTOR:
        return f"no key of NixlConnector; kvferry has {OF_NIXL_CONNECTOR[key]}"
    near = difflib.get_close_matches(key, known, 1, 0.5)
    return f"{near[0]!r}, perhaps: there is no key {key!r}" if near else f"one of {', '.join(known)}"


class _Said(str):
    """A value that an error has described already."""

    def __repr__(self) -> str:
        return str(self)
