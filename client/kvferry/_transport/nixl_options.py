"""The options of NIXL and of UCX that can be chosen, each with its reason. Pure: imports neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry._arguments import integer, seconds, string_map, text
from kvferry.errors import InvalidField

PROGRESS_DELAY_US = 100_000
"""The serving agent's progress thread sleeps this long unless an arriving message wakes it. Messages do: 1 microsecond
and 100 ms measure the same."""

CORES_FOR_TWO = 4
"""Cores from which two agents read at once by default: an engine's own threads need the others."""

_LEAST = {"reading_agents": 1, "tcp_segment": 1, "chunk_bytes": 1, "chunk_descriptors": 1, "bytes_in_flight": 1}
_LEAST |= {"bytes_in_flight_total": 1, "retired_agents": 0}


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How bytes move. UCX's settings in the environment (``UCX_...``) take precedence over these.

    The environment is read when an agent is made. So ``UCX_NET_DEVICES``, which chooses network cards, may be set by
    the engine before that, as vLLM does for each worker by ``VLLM_NIC_SELECTION_VARS``.

    Attributes:
        backend: NIXL's backend, by NIXL's name. The backend must be able to read memory of other processes. Only UCX
            has been run. The options of UCX and TCP mean nothing to others.
        backend_parameters: parameters of the backend, by NIXL's names. They replace kvferry's parameters for UCX.
        ucx_tls: one UCX transport, as ``UCX_TLS``: ``tcp`` in tests. Empty: UCX chooses. For a list set ``UCX_TLS``
            instead, because NIXL separates options by commas. A list must contain ``tcp``: UCX's shared memory cannot
            report a peer's death and is refused in error mode "peer".
        tcp_segment: bytes per segment of UCX's TCP. UCX's default is 8 KiB; 256 KiB reads 3 times as fast.
        tcp_user_timeout: seconds until a cut TCP connection is reported; 0: the kernel decides, after minutes. The
            transfer's deadline ends the wait in any case. Off by default: when both agents of a connection had set
            it, one was seen to abort its process after a cut that healed.
        reading_agents: agents that read at once, each with a thread and a core while bytes move. Peers are spread over
            them; where posts copy synchronously (CMA, same host) they also share each large read, and two are up to 1.8
            times as fast as one on idle cores. None: one, and a second for such reads where the process may run on
            `CORES_FOR_TWO` cores.
        chunk_bytes: bytes per NIXL handle. Deadlines, cancelling and fairness act between chunks. Where posts copy
            synchronously a chunk has up to four times as many bytes, but no more than about 10 ms of copying.
        chunk_descriptors: descriptors per NIXL handle; each costs 3 microseconds, on TCP 10.
        bytes_in_flight: posted and unfinished bytes per peer; at least two chunks are always allowed.
        bytes_in_flight_total: the same over all peers, so that many sources do not flood one destination. The reading
            agents share this equally; one chunk is always allowed.
        warm_up_timeout: seconds for a new peer to answer a first read of a few bytes.
        fence_time: seconds after the end of a transfer until a chunk that is still under way counts as stuck, and its
            agent is retired. This is long, because destroying an agent while it reads was seen to kill the source on
            TCP. Without a TCP connection to the source, it is one second at most.
        retired_agents: the most agents that are retired and not destroyed yet; they finish their other reads first.
    """

    backend: str = "UCX"
    backend_parameters: Mapping[str, str] = field(default_factory=dict, hash=False)
    ucx_tls: str = ""
    tcp_segment: int = 256 << 10
    tcp_user_timeout: float = 0.0
    reading_agents: int | None = None
    chunk_bytes: int = 16 << 20
    chunk_descriptors: int = 8192
    bytes_in_flight: int = 64 << 20
    bytes_in_flight_total: int = 256 << 20
    warm_up_timeout: float = 5.0
    fence_time: float = 60.0
    retired_agents: int = 8

    def __post_init__(self) -> None:
        if not text("backend", self.backend):
            raise InvalidField("backend", self.backend, "the name of one of NIXL's backends, e.g. UCX")
        object.__setattr__(self, "backend_parameters", string_map("backend_parameters", self.backend_parameters))
        if {",", "="} & set(text("ucx_tls", self.ucx_tls)):
            raise InvalidField("ucx_tls", self.ucx_tls, "one UCX transport; set UCX_TLS for a list")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name != "reading_agents":
                object.__setattr__(self, name, integer(name, value, least))
        for name in ("tcp_user_timeout", "warm_up_timeout", "fence_time"):
            object.__setattr__(self, name, seconds(name, getattr(self, name), zero=True))

    @property
    def most_reading_agents(self) -> int:
        """The most agents that read at once."""
        if self.reading_agents is not None:
            return self.reading_agents
        return 2 if len(os.sched_getaffinity(0)) >= CORES_FOR_TWO else 1

    def parameters(self) -> dict[str, str]:
        """The parameters of NIXL's backend. UCX's error handling mode stays "peer": mode "none" hangs for ever when a
        peer dies or cannot be reached."""
        if self.backend != "UCX":
            return dict(self.backend_parameters)
        ucx = {"TCP_TX_SEG_SIZE": str(self.tcp_segment), "TCP_RX_SEG_SIZE": str(self.tcp_segment)}
        if self.ucx_tls:
            ucx["TLS"] = self.ucx_tls
        if self.tcp_user_timeout:
            ucx["TCP_USER_TIMEOUT"] = f"{round(self.tcp_user_timeout * 1000)}ms"
        set_here = {"engine_config": ",".join(f"{key}={value}" for key, value in ucx.items())}
        return {**set_here, **self.backend_parameters}
