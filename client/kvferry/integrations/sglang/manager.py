"""The backend's manager: one in the scheduler of each rank of SGLang."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import BaseKVManager, StateType
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_model, get_parallel, get_serving
from sglang.srt.utils.network import NetworkAddress
from transformers import AutoConfig

from kvferry import Blocks, Cache, Client, EngineSpec, Prompt, Publication, Read, Release, SchedulerPort, shard
from kvferry.engine import WorkerOutput, WorkerPort
from kvferry.errors import InvalidField, KvferryError
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.remembered import remember
from kvferry.integrations.sglang import hooks
from kvferry.integrations.sglang.aux_rows import AuxRows
from kvferry.integrations.sglang.bootstrap import Source, Sources, register_source, room_is_usable
from kvferry.integrations.sglang.metrics import counts_of
from kvferry.integrations.sglang.pools import FULL, Pools, describe_pools
from kvferry.integrations.sglang.settings import Settings, check_supported

logger = logging.getLogger(__name__)

BREATH = 1e-4
"""Seconds of a pause in which a scheduler that waits for reads or releases leaves Python's lock to other threads."""

BETWEEN_BREATHS = 1e-3
"""Seconds from one such pause to the next."""

REPEATED = "the request's bootstrap_room is that of another request, which is under way"
"""The failure of a request whose room belongs to another request."""

PREFIX_SOURCE = "kvferry_prefix_source"
"""The field of a request's ``custom_params``, and of its answer's ``meta_info``, with the engine reference."""

Pages = npt.NDArray[np.int32]


class RequestFailed(Exception):
    """The failure of a request; SGLang puts it into the request's answer. The reason begins with the name of kvferry's
    error, if there is one; empty: this rank knows no reason, so another rank has failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"kvferry: {reason or 'another rank has failed'}")


class KvferryManager(BaseKVManager):  # type: ignore[misc]
    """Registers a rank's pools, publishes on rank 0 for all ranks, and reads on every rank for itself.

    Ranks of one engine compute in step: SGLang gives all ranks the same requests in the same order, with the same
    pages. When rank 0 has the output of a step, each rank has written its KV cache, since the output comes after a
    reduction over the ranks, and every layer's attention precedes that reduction.

    SGLang reads `kv_args`, its own description of the pools, and `prefill_info_table`, see `_Reachable`. The `leader`
    is rank 0. `adapters` are the names of the loaded LoRA adapters of prefill's latest requests, with SGLang's ids of
    them; the prompts of one that was forgotten are not looked up. `loads` are the `RadixLoads` of prefill, if it can
    have any, once its scheduler is made.
    """

    enable_deferred_decode_kv_release = True
    loads: Any = None

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        self.kv_args = args
        mode: Literal["prefill", "decode"] = disaggregation_mode.value
        prefills = mode == "prefill"
        makes = hooks.MAKES_SENDERS if prefills else hooks.MAKES_RECEIVERS
        for is_so, does in (
            (prefills or hooks.queues_that_hold, "holds the pages of failed requests until they are quiet"),
            (hooks.is_hooked(makes), "tells the backend each prompt"),
        ):
            if not is_so:
                raise InvalidField("version of SGLang", version("sglang"), f"one whose {mode} {does}, as 0.5.23's")
        parallel = get_parallel()
        pool, draft = args.kvferry_pools
        check_supported(args, parallel, get_disagg(), get_memory(), get_exec().features, draft)
        self._settings = Settings.of()
        model = ModelConfig.from_server_args(server_args)
        self.aux = AuxRows(tuple(args.aux_data_ptrs), tuple(args.aux_item_lens), int(model.vocab_size))
        heads = model.get_total_num_kv_heads()
        held = shard(parallel.tp_rank, parallel.tp_size, heads)
        window = int(getattr(model.hf_text_config, "sliding_window", 0) or 0)
        self.pools: Pools = describe_pools(pool, held, heads, window, self._settings.layer_names)
        engine_id = self._settings.engine_id or f"sglang-{mode}-{socket.gethostname()}-{get_serving().port}"
        described = cache_identity(model.model_path, model, _config_of(model), get_model().kv_cache_dtype)
        spec = EngineSpec(engine_id, self.pools.groups, parallel.tp_size, described)
        self.leader = parallel.tp_rank == 0
        self.parties = int(parallel.tp_size)
        self._client: Client = self._settings.client()
        self._port: SchedulerPort | None = None
        token = self._open(spec, parallel.tp_group)
        self.worker = WorkerPort(self._client, spec, int(parallel.tp_rank), token=token)
        self._cache: Cache = self.worker.register(
            self.pools.tensors,
            planes=self.pools.planes,
            # Planes declare the heads of each rank; a plane with a whole axis is latent, and equal on all ranks.
            replicated=True,
            labels={"tp_rank": int(parallel.tp_rank)},
            serve=mode == "prefill",
            timeout=self._settings.start_timeout,
        )
        self.prefix_share, self.prefix_wait = self._settings.prefix_share, self._settings.prefix_wait
        self.adapters: dict[str, str] = {}
        self._released: dict[int, Release] = {}
        self._reads: dict[int, Read] = {}
        self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._breathed = 0.0
        self.sources = Sources()
        self.counts = counts_of(int(parallel.tp_rank))
        self.prefill_info_table = _Reachable()
        if mode == "prefill":
            # `KvferrySender` publishes only whole prompts; for early parts SGLang would record an event of CUDA.
            envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.set(False)
            self.register_to_bootstrap()
        else:
            self._cache.prepare()

    def _open(self, spec: EngineSpec, ranks: Any) -> str:
        """Open the engine's session on rank 0, and return its token on every rank. The token is a secret; it takes the
        way of SGLang's own requests from rank to rank."""
        opened, error = "", None
        if self.leader:
            try:
                self._port = SchedulerPort(self._client, spec, timeout=self._settings.start_timeout)
                opened = str(self._port.token)
            except KvferryError as failed:
                # Raised after the broadcast: the other ranks wait for the token.
                error = failed
        token: str = ranks.broadcast_object(opened, src=0)
        if error is not None:
            raise error
        if not token:
            raise RuntimeError("rank 0 could not open the engine's session: its log says why")
        return token

    def register_to_bootstrap(self) -> None:
        """Make this instance known to decode; see `bootstrap`."""
        if self._port is None:
            return
        parallel, serving = get_parallel(), get_serving()
        host = serving.host
        if parallel.dist_init_addr:
            host = NetworkAddress.parse(parallel.dist_init_addr).resolved().host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        address = NetworkAddress(host, get_disagg().disaggregation_bootstrap_port)
        register_source(address.to_url(), self.own_source)

    # For senders and receivers.

    def claim(self, room: int, request: Any) -> str:
        """Claim a room for a request until its end; return the problem, empty if there is none. Routers and clients
        repeat requests with the room of the first, and a repetition must not end the first."""
        if not room_is_usable(room):
            return "the request's bootstrap_room is not from 1 to 2**63 - 1"
        return "" if self._requests.setdefault(room, request) is request else REPEATED

    def unclaim(self, room: int, request: Any) -> None:
        """Free the room of a request that has ended, if this request has claimed the room."""
        if self._requests.get(room) is request:
            del self._requests[room]

    def blocks(
        self, pages: Pages, states: Sequence[Any], first_token: int, end_token: int | None = None
    ) -> dict[str, Blocks]:
        """Return a request's blocks by group: of its pages from `first_token` to `end_token` (None: the end of the
        pages), and of the pages of each state in SGLang's list. Those of a window are the last pages."""
        found = {FULL: Blocks(np.asarray(pages), first_token, end_token)}
        for kind, listed in zip(self.kv_args.state_types, states, strict=False):
            if kind == StateType.SWA and self.pools.window:
                skipped = (len(pages) - len(listed)) * int(self.kv_args.page_size)
                found[self.pools.window] = Blocks(np.asarray(listed), first_token + skipped, end_token)
        return found

    def breathe(self) -> None:
        """Leave Python's lock to other threads now and then, while the scheduler waits for a read or a release."""
        now = time.monotonic()
        if now - self._breathed > BETWEEN_BREATHS:
            time.sleep(BREATH)
            self._breathed = time.monotonic()

    # For senders, on rank 0.

    def publish(
        self, reference: str, name: str, blocks: dict[str, Blocks], payload: bytes, prompt: Prompt
    ) -> Publication:
        """Publish a request's blocks under the reference that decode also makes. Raises `KvferryError`."""
        publication = self.port.publish(name, blocks, payload=payload, reference=reference, prompt=prompt)
        self.counts.add("source.published")
        return publication

    def take_release(self, publication: Publication) -> Release | None:
        """Return the release of a publication, once; None: it has not come, or was returned."""
        for release in self.port.released():
            self._released[release.publication] = release
            self.counts.add("source.released", release.outcome.name.lower())
        found = self._released.pop(publication.number, None)
        if found is None:
            self.breathe()
        return found

    def see(self, request: Any, adapter: str) -> None:
        """Take notice of a request of prefill with this LoRA adapter: questions name adapters. If it asks for this
        engine's reference, its answer has it."""
        if not self.leader:
            return
        if adapter:
            remember(self.adapters, adapter, request.lora_id)
        if PREFIX_SOURCE in (request.sampling_params.custom_params or ()):
            request.customized_info = {**(request.customized_info or {}), PREFIX_SOURCE: [self.port.engine_reference]}

    def gathered(self, output: WorkerOutput) -> list[WorkerOutput]:
        """Return the outputs of all ranks' workers, of which each rank gives its own."""
        if self.parties == 1:
            return [output]
        found: list[WorkerOutput] = get_parallel().tp_group.all_gather_object(output)
        return found

    @property
    def port(self) -> SchedulerPort:
        if self._port is None:
            raise RuntimeError("only rank 0 has the engine's session")
        return self._port

    @property
    def own_source(self) -> Source:
        """This instance, as decode finds it."""
        return Source(self.port.spec.engine_id, self.port.token.home)

    # For receivers.

    def read(
        self,
        reference: str,
        room: int,
        name: str,
        blocks: dict[str, Blocks],
        tokens: tuple[int, int] | None,
        prompt: Prompt,
    ) -> Read:
        """Start to read this rank's share of a prompt: `tokens`, as they are published; None: all tokens, when the
        publication is complete. Every rank gives the same name. Raises `KvferryError`."""
        read = self._cache.read(
            reference,
            blocks,
            tokens,
            read_id=name,
            parties=self.parties,
            progressive=tokens is not None,
            timeout=self._settings.read_timeout,
            prompt=prompt,
        )
        self._reads[room] = read
        return read

    def decline(self, reference: str, prompt: Prompt = Prompt.unknown) -> None:
        """Decline a publication that will not be read, unless it is known to be of another prompt; returns at once."""
        if self._port is None:
            return
        try:
            self._port.decline(reference, prompt=prompt)
        except KvferryError as error:
            logger.warning("a request could not be declined: %s", error)

    # For SGLang's decode.

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether the pages of a failed request are quiet on this rank (R4)."""
        read = self._reads.get(bootstrap_room)
        return read is None or read.quiet

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forget the read of a request whose pages SGLang has freed, or uses."""
        self._reads.pop(bootstrap_room, None)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True: receivers ask for a request's prefill instance themselves."""
        return True

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        """Fail a request that decode has retracted for new weights: a room cannot be used twice."""
        receiver.fail("kvferry's backend does not compute retracted requests again")


def _config_of(model: Any) -> dict[str, object]:
    """Return the model's own configuration; for a model that only SGLang knows, with SGLang's additions."""
    try:
        found: dict[str, object] = AutoConfig.from_pretrained(model.model_path, revision=model.revision).to_dict()
    except (ValueError, OSError):
        found = model.hf_config.to_dict()
    return found


class _Reachable(dict[str, Any]):
    """The table in which SGLang's decode looks up prefill instances, each of one data-parallel rank. SGLang's scheduler
    would ask for an unknown one in its loop; receivers ask on threads instead, so each is known here."""

    def get(self, key: str, default: Any = None) -> Any:
        return SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
