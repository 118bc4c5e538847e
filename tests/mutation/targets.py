"""Files, the tests that must fail for their mutants, and the mutants that are not mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PLAN = (
    "tests/planner/test_held_states.py",
    "tests/planner/test_planner_decisions.py",
    "tests/planner/test_line_rule.py",
    "tests/planner/test_requests.py",
    "tests/planner/test_selections.py",
)
NEEDED = ("tests/planner/test_needed.py",)
ROWS = ("tests/planner/test_rows.py",)
SEGMENTS = ("tests/planner/test_segments.py",)
COUNTED = ("tests/planner/test_descriptors_counted.py",)
REFUSALS = ("tests/planner/test_refusals.py", "tests/planner/test_overlaps.py", "tests/planner/test_statements.py")
ORACLE = ("tests/planner/test_oracle.py", "tests/planner/test_sweep.py")
HOME = (
    "tests/server/domain/test_leases.py",
    "tests/server/domain/test_publications.py",
    "tests/server/domain/test_engines.py",
    "tests/server/domain/test_questions.py",
    "tests/server/domain/test_shares.py",
    "tests/server/home/test_home.py",
    "tests/server/domain/test_decisions.py",
    "tests/server/domain/test_journal.py",
    "tests/server/servicers/test_authority.py",
)
SHARES = ("tests/server/domain/test_shares.py",)
FEEDS = (
    "tests/server/domain/test_feeds.py",
    "tests/server/servicers/test_watch_streams.py",
    "tests/server/servicers/test_notifications.py",
    "tests/server/servicers/test_asks.py",
    "tests/server/servicers/test_decline_anywhere.py",
)
STREAMS = (*FEEDS, "tests/server/home/test_home.py")
LOGS = ("tests/server/node/test_logs.py",)
HANDSHAKES = ("tests/server/servicers/test_handshakes.py",)
BOUNDS = ("tests/server/servicers/test_bounds.py",)
MODEL = ("tests/model/test_model.py",)
DEFENCE = ("tests/transport/test_defence.py",)
FOOTPRINT = ("tests/planner/test_footprint.py", "tests/planner/test_large_caches.py")
LINKS = ("tests/transport/test_link_decisions.py",)
STEPS = ("tests/control/test_granted_steps.py",)
AGAIN = ("tests/control/test_reacquisition.py", "tests/control/test_progressive_acquisition.py")
HINTS = ("tests/testing/test_hints.py",)
HOLDER = ("tests/control/test_lease_holder.py", "tests/control/test_telling.py")
ACQUISITION = ("tests/control/test_acquisition.py",)
LYING = ("tests/testing/test_fabric_lying_homes.py", "tests/api/test_hostile_arguments.py")
WITHHELD = ("tests/server/servicers/test_agent_metadata.py",)
READ_BLOCKS = ("tests/server/servicers/test_read_blocks.py",)
LOOP = ("tests/control/test_loop.py",)
NEWS = ("tests/control/test_news.py",)
OWN_READS = ("tests/reads/test_cache_reads.py",)
IN_ASYNCIO = ("tests/api/test_asyncio.py",)
READ_ENDINGS = ("tests/e2e/test_read_endings.py",)
HOSTILE = ("tests/api/test_hostile_arguments.py",)
OFFERS = ("tests/control/test_offers.py", "tests/control/test_offer_decisions.py")
RANK = ("tests/reads/test_rank_decisions.py",)
TURNS = ("tests/reads/test_turns.py",)
ENGINE_READS = ("tests/engine/test_read_decisions.py", "tests/engine/test_scheduled_reads.py")
BLOCK_USE = ("tests/control/test_block_use.py", "tests/api/test_blocks_in_use.py")
CONTROL = ("tests/control/test_renewals.py", "tests/reads/test_rank_shares.py", "tests/control/test_telling.py")
RENEWALS = ("tests/control/test_renewal_decisions.py",)
SLOTS = ("tests/transport/test_staging_decisions.py",)
READING = ("tests/transport/test_reading_decisions.py", "tests/transport/test_retired_agents.py")
STAGING = ("tests/transport/test_staging.py",)
READS = ("tests/transport/test_raw_reads.py", "tests/transport/test_faults.py", "tests/transport/test_agents.py")
SHARED = ("tests/transport/test_shared_reads.py", "tests/transport/test_devices.py")
QUIET = ("tests/transport/test_quiet.py",)
END_TO_END = ("tests/e2e/test_reads.py", "tests/e2e/test_expiry.py")
THREADS = ("tests/transport/test_reading_thread.py",)
CALIBRATION = ("tests/transport/test_calibration.py",)
SOURCES = ("tests/reads/test_source_engines.py",)
PARTLY_KNOWN = ("tests/integrity/test_partly_known_sums.py",)
SUMMED = ("tests/integrity/test_checksum_order.py",)
VERIFIED = ("tests/integrity/test_verified_reads.py",)
GIVEN_UP = ("tests/engine/test_given_up.py",)
SENT_AGAIN = ("tests/engine/test_sent_again.py", "tests/engine/test_publishing.py")
TRACED = ("tests/testing/test_traced_reads.py",)
SESSION = ("tests/api/test_blocks_in_use.py", "tests/api/test_copies.py", "tests/control/test_sizes.py")
WATCHES = ("tests/control/test_watches.py", "tests/control/test_hostile_homes.py")
TOLD = ("tests/control/test_telling.py", "tests/control/test_lease_holder.py", "tests/control/test_hostile_homes.py")
STEP_ORDERS = ("tests/engine/test_step_orders.py",)
PARTS = ("tests/planner/test_request_parts.py", "tests/planner/test_missing_groups.py")
TAILS = ("tests/memory/test_tails.py",)
SLICES = ("tests/server/home/test_time_slices.py",)
ROTATION = ("tests/server/home/test_whose_turn.py",)
WORKER = ("tests/server/home/test_worker.py",)
ACKNOWLEDGED = ("tests/control/test_acknowledgements.py",)
DECODED = ("tests/server/node/test_decoded_size.py",)
COMPLETE = ("tests/planner/test_completeness.py",)
DECLARED = ("tests/testing/test_wrong_declarations.py",)
ROUTERS = (
    "tests/server/servicers/test_router_references.py",
    "tests/server/servicers/test_router_impostors.py",
    "tests/server/servicers/test_decline_anywhere.py",
)
QUESTIONS = ("tests/server/domain/test_questions.py", "tests/server/servicers/test_asks.py")
FABRIC_ROUTERS = ("tests/testing/test_fabric_routers.py",)
PORT = ("tests/engine/test_port_decisions.py",)
PROMPTS = ("tests/api/test_prompt_values.py",)
RIGHT_PROMPT = ("tests/testing/test_right_prompt.py", "tests/testing/test_right_prompt_taken.py")
OFFERS = ("tests/control/test_offers.py", "tests/control/test_offer_decisions.py")
PORTS = ("tests/engine/test_ports.py", "tests/engine/test_step_thread.py")
PROGRESSIVE = ("tests/testing/test_progressive_reads.py", "tests/testing/test_progressive_layers.py")
VLLM = (
    "tests/integrations/vllm/test_sending.py",
    "tests/integrations/vllm/test_routed.py",
    "tests/integrations/vllm/test_order.py",
    "tests/integrations/vllm/test_first_token.py",
)
VLLM_STEPS = (
    "tests/integrations/vllm/test_rest.py",
    "tests/integrations/vllm/test_idle_steps.py",
    "tests/integrations/vllm/test_waiting.py",
    "tests/integrations/vllm/test_params.py",
    "tests/integrations/vllm/test_order.py",
)
"""Tests that need vLLM's block managers, and no engine."""
VLLM_PREFIXES = ("tests/integrations/vllm/test_router_hints.py", "tests/integrations/vllm/test_prefix_reads.py")
WITHOUT_SGLANG = {
    "aux_rows": ("tests/integrations/sglang/test_aux_rows.py",),
    "bootstrap": ("tests/integrations/sglang/test_bootstrap.py",),
    "settings": ("tests/integrations/sglang/test_sglang_settings.py", "tests/integrations/sglang/test_support.py"),
}
"""Tests that need no SGLang; by module."""
WITH_SGLANG = {
    "pools": ("tests/integrations/sglang/test_pools.py",),
    "hooks": (
        "tests/integrations/sglang/test_endings.py",
        "tests/integrations/sglang/test_stepping.py",
        "tests/integrations/sglang/test_sglang_prompts.py",
    ),
    "requests": ("tests/integrations/sglang/test_endings.py",),
    "manager": ("tests/integrations/sglang/test_endings.py",),
}
"""Tests that need SGLang's classes, and no engine; by module."""


@dataclass(frozen=True)
class Target:
    """A file.

    Attributes:
        stages: tests, the quickest first; a mutant that the first do not notice meets the next.
        equivalent: mutants that are no mistakes, by `Mutant.name`, with the reason.
        environment: the folder of the Python that runs the tests; a target is left out where there is none.
    """

    stages: Sequence[Sequence[str]]
    equivalent: Mapping[str, str] = field(default_factory=dict)
    environment: str = ".venv"


PLANNER = (PLAN, REFUSALS, ORACLE)
LESSOR = (HOME, MODEL)
LEASE = ("tests/control/test_reader_leases.py", "tests/control/test_lease_decisions.py")

MILLIONS = "one more or less of a limit of millions"
ONE_SHARD = "with one shard every state is held, whatever its interleave"
STRICT_ORDER = "any factor above the largest count keeps the cuts apart"
BEFORE_ANY = "a clock of a machine that runs reads more"
NO_ROOM = "no region reaches there, so that there is no room for a byte"
SHORT_CUT = "a short cut: the general way answers the same"
BOTH_WAYS = "a short cut: the search answers the same"
FOR_THE_TYPE = "never so: the type asks for it"
BOTH_WAYS_ROUND = "equal is equal both ways round"
ABOUT = "sizes are about what things take in memory"
ANY_NUMBER = "any number that was not given before"
TO_THE_NANOSECOND = "a time to the nanosecond"
RESET = "set again before it is looked at"

TARGETS: dict[str, Target] = {
    "client/kvferry/planner/token_line.py": Target(
        (*PLANNER, TAILS, VERIFIED),
        {"Line.pieces: 1 -> 2": STRICT_ORDER, "StateLayout.of: 1 -> 2": ONE_SHARD},
    ),
    "client/kvferry/planner/coverage.py": Target(
        (COMPLETE, DECLARED, *PLANNER),
        {"Coverer.__init__: self._effort = 0 -> pass": RESET, "Coverer.cover: 0 -> 1": MILLIONS},
    ),
    "client/kvferry/planner/expansion.py": Target(PLANNER),
    "client/kvferry/planner/rows.py": Target(
        (ROWS, *PLANNER), {"loops_of: True -> False": "what is zipped has equal lengths by its construction"}
    ),
    "client/kvferry/planner/request_blocks.py": Target((NEEDED, *PLANNER)),
    "client/kvferry/planner/lane.py": Target((SEGMENTS, COUNTED, *PLANNER, PARTS)),
    "server/kvferry_server/domain/lessor.py": Target((*LESSOR, BOUNDS)),
    "server/kvferry_server/domain/sources.py": Target((*LESSOR, BOUNDS)),
    "server/kvferry_server/domain/records.py": Target(LESSOR),
    "server/kvferry_server/domain/publications.py": Target(LESSOR),
    "server/kvferry_server/domain/steps.py": Target(
        (HOME, BOUNDS, VERIFIED, MODEL),
        {
            "ChecksumPage.near: near and self.units.begin < other.units.end and (other.units.begin < self.units.end) "
            "-> self.units.begin < other.units.end and other.units.begin < self.units.end": SHORT_CUT,
        },
    ),
    "server/kvferry_server/domain/engine.py": Target(LESSOR, {"Engine.live_until: 0.0 -> 1.0": BEFORE_ANY}),
    "server/kvferry_server/domain/registry.py": Target((*LESSOR, LOGS)),
    "server/kvferry_server/domain/limits.py": Target((SHARES, MODEL)),
    "server/kvferry_server/domain/registrations.py": Target(
        (*LESSOR, HANDSHAKES),
        {
            "Registration._check_agent: hmac.compare_digest(hashlib.sha256(agent.metadata).digest(), "
            "agent.metadata_sha256) -> hmac.compare_digest(agent.metadata_sha256, "
            "hashlib.sha256(agent.metadata).digest())": BOTH_WAYS_ROUND,
            "Registration.size: 256 -> 257": ABOUT,
            "Registration.size: 256 -> 255": ABOUT,
            "Registration.size: 0 -> 1": ABOUT,
            "Registration.size: 4 -> 5": ABOUT,
            "Registration.size: 4 -> 3": ABOUT,
            "text_bytes: 4 -> 5": ABOUT,
            "text_bytes: 4 -> 3": ABOUT,
            "text_bytes: 1 -> 2": ABOUT,
            "_difference: True -> False": "as many of each, as is asked before",
        },
    ),
    "server/kvferry_server/servicers/kv_transfer.py": Target((READ_BLOCKS, WITHHELD, BOUNDS, MODEL)),
    "server/kvferry_server/servicers/watch.py": Target((STREAMS, BOUNDS, MODEL)),
    "server/kvferry_server/servicers/notify.py": Target((FEEDS, MODEL)),
    "client/kvferry/_control/reader_lease.py": Target(
        (LEASE, MODEL),
        {
            "ReaderLease.without_end: 0.0 -> 1.0": "its deadline is set, and it is not renewed",
            "ReaderLease.renewed: left < 2 * self.renew_every -> left <= 2 * self.renew_every": TO_THE_NANOSECOND,
        },
    ),
    "client/kvferry/_control/acquire_request.py": Target((ACQUISITION, HOLDER, LYING)),
    "client/kvferry/_control/acquisition.py": Target(
        (ACQUISITION, AGAIN, CONTROL),
        {"Acquisition._accept: False -> True": "the home is asked again, 20 ms later, as after any call that failed"},
    ),
    "client/kvferry/_control/granted_steps.py": Target(
        (STEPS, ACQUISITION), {"_check_same: before.end_token or 0 -> before.end_token": FOR_THE_TYPE}
    ),
    "client/kvferry/_control/lease_holder.py": Target((HOLDER, CONTROL, HINTS)),
    "client/kvferry/_loop.py": Target((LOOP, NEWS, ENGINE_READS)),
    "client/kvferry/_control/publications.py": Target((OFFERS, MODEL)),
    "client/kvferry/_control/renewals.py": Target(
        (RENEWALS, CONTROL, MODEL),
        {"Renewals._not_renewed: 0.0 -> 1.0": "RENEW_AGAIN is 1.0, and it is never sooner"},
    ),
    "client/kvferry/_transport/bounds.py": Target(
        (DEFENCE,),
        {
            "RegionMap._ends_at: highest >= ADDRESS_LIMIT -> highest > ADDRESS_LIMIT": NO_ROOM,
            "RegionMap._ends_at: len(bases) == 1 -> len(bases) != 1": SHORT_CUT,
            "RegionMap.check_ranges: count >= 1 -> count > 1": SHORT_CUT,
        },
    ),
    "client/kvferry/planner/footprint.py": Target((FOOTPRINT, ORACLE)),
    "client/kvferry/_transport/transfer.py": Target((("tests/transport/test_tracking.py",), LINKS, READS)),
    "client/kvferry/_transport/peer_link.py": Target(
        (LINKS, READS),
        {
            "Link.poll: now < self._poll_at or self.quiet -> now < self._poll_at": "what is quiet has nothing to check",
            "Link.poll: took > (len(chunks) - 1 + WORKED) * self._cheapest -> "
            "took >= (len(chunks) - 1 + WORKED) * self._cheapest": TO_THE_NANOSECOND,
        },
    ),
    "client/kvferry/_transport/reading_thread.py": Target((READING, THREADS, READS)),
    "client/kvferry/_transport/transport.py": Target((READING, THREADS, READS, STAGING, SHARED)),
    "client/kvferry/_transport/staging_pool.py": Target((SLOTS, STAGING)),
    "client/kvferry/_reads/rank_reads.py": Target(
        (RANK, TURNS, PORTS),
        {
            "RankReads._move: self._loop.now() + EXPAND_FOR -> self._loop.now() - EXPAND_FOR": "the loop has a turn "
            "after every expansion, not only after long ones: some microseconds",
        },
    ),
    "client/kvferry/_control/block_use.py": Target((BLOCK_USE,)),
    "client/kvferry/engine/scheduler.py": Target((PORT, PORTS)),
    "client/kvferry/engine/scheduler_reads.py": Target((ENGINE_READS, PORTS)),
    "client/kvferry/_reads/leased_read.py": Target(
        (ENGINE_READS, OWN_READS, PORTS, END_TO_END),
        {"LeasedRead.__init__: self.complete = False -> pass": "set with the lease, before anything asks for it"},
    ),
    "client/kvferry/_reads/leased_reads.py": Target((ENGINE_READS, OWN_READS, PORTS, END_TO_END)),
    "client/kvferry/_reads/rank_read.py": Target((RANK, OWN_READS, QUIET)),
    "client/kvferry/_reads/cache_reads.py": Target(
        (OWN_READS, READ_ENDINGS, END_TO_END, IN_ASYNCIO, PROGRESSIVE),
        {
            "_result: share is None or acquired is None -> share is None and acquired is None": FOR_THE_TYPE,
            "_result: share is None or acquired is None -> acquired is None": FOR_THE_TYPE,
            "_result: share is None or acquired is None -> share is None": FOR_THE_TYPE,
        },
    ),
    "client/kvferry/engine/worker.py": Target((PORT, PORTS, STEP_ORDERS, PROGRESSIVE)),
    "client/kvferry/engine/scheduler_read.py": Target((PORT, ENGINE_READS, PORTS, PROGRESSIVE)),
    "client/kvferry/planner/plan.py": Target((PARTS, *PLANNER)),
    "client/kvferry/_transport/calibration.py": Target((CALIBRATION,)),
    "client/kvferry/_reads/verifier.py": Target((PARTLY_KNOWN, VERIFIED)),
    "client/kvferry/_integrity/checksum_publisher.py": Target((VERIFIED, SUMMED)),
    "client/kvferry/_reads/source_engines.py": Target((SOURCES, RANK, END_TO_END)),
    "client/kvferry/_control/publication_sender.py": Target((GIVEN_UP, PORT, SENT_AGAIN)),
    "client/kvferry/_control/home_session.py": Target((ACKNOWLEDGED, TRACED, SESSION, GIVEN_UP, WATCHES, SENT_AGAIN)),
    "client/kvferry/_prompt.py": Target((PROMPTS, RIGHT_PROMPT, HOSTILE)),
    "client/kvferry/_control/right_prompt.py": Target(
        (RIGHT_PROMPT, OFFERS), {"ReaderPrompt._error: 3 -> 4": "how many ends a message shows"}
    ),
    "client/kvferry/_control/watcher.py": Target((WATCHES,)),
    "client/kvferry/_control/notifier.py": Target((TOLD,)),
    "server/kvferry_server/domain/router_keys.py": Target((QUESTIONS, ROUTERS, FABRIC_ROUTERS)),
    "server/kvferry_server/domain/routing.py": Target((QUESTIONS, ROUTERS, FABRIC_ROUTERS)),
    "server/kvferry_server/home/time_slices.py": Target(
        (ROTATION, WORKER, SLICES),
        {"TimeSlices.over: self._clock() > self._until -> self._clock() >= self._until": TO_THE_NANOSECOND},
    ),
    "server/kvferry_server/node/decoded_size.py": Target(
        (DECODED,),
        {
            "Shape._add: 2 -> 1": "the first guess is larger, so that more requests are walked over",
            "_count_numbers: length < LONG_LIST -> length <= LONG_LIST": BOTH_WAYS,
            "_count_numbers: length < LONG_LIST -> length >= LONG_LIST": BOTH_WAYS,
            "_count_numbers: if length < LONG_LIST: return len(raw[place:place + length].translate(None, _CONTINUED)) "
            "-> if not length < LONG_LIST: "
            "return len(raw[place:place + length].translate(None, _CONTINUED))": BOTH_WAYS,
        },
    ),
    "client/kvferry/integrations/vllm/idle_steps.py": Target(
        (VLLM_STEPS,),
        {
            "Rest.may_rest: self._now() < self._until -> self._now() <= self._until": TO_THE_NANOSECOND,
            "Rest.denied: self._now() >= self._until -> self._now() > self._until": TO_THE_NANOSECOND,
        },
        environment=".venv-vllm",
    ),
    "client/kvferry/integrations/vllm/loads.py": Target((VLLM_STEPS, VLLM_PREFIXES), environment=".venv-vllm"),
    **{
        f"client/kvferry/integrations/vllm/{name}.py": Target((VLLM,), environment=".venv-vllm")
        for name in ("outgoing", "sending", "worker")
    },
    **{f"client/kvferry/integrations/sglang/{name}.py": Target((tests,)) for name, tests in WITHOUT_SGLANG.items()},
    **{
        f"client/kvferry/integrations/sglang/{name}.py": Target((tests,), environment=".venv-sglang")
        for name, tests in WITH_SGLANG.items()
    },
}
