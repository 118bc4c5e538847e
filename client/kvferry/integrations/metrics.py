"""The names of what a client measures, for metrics systems: one name and one explanation for each thing."""

from __future__ import annotations

from typing import NamedTuple


class Named(NamedTuple):
    """The name of a metric, without the ``_total`` of counters, and what it says."""

    name: str
    documentation: str


READS_IN_PROGRESS = Named("kvferry_reader_reads_in_progress", "Reads in progress, by stage.")
READS = Named("kvferry_reader_reads", "Reads that have ended, by outcome.")
FAILURES = Named("kvferry_reader_failures", "Reads that failed or were not granted, by the class of their error.")
DISPUTED = Named("kvferry_reader_disputed", "Good reads whose lease had ended, as their home has said since.")
PROMPTS = Named("kvferry_reader_prompts", "Good reads, by whether their source has marked the same prompt.")
WAIT = Named(
    "kvferry_reader_wait_seconds", "From a read's request until the source's home promised its blocks; of good reads."
)
GRANT = Named(
    "kvferry_reader_grant_seconds", "From the promise until all blocks were known, or a progressive read's first."
)
ATTACH = Named("kvferry_reader_attach_seconds", "From there until the engine had blocks to read into.")
JUDGE = Named("kvferry_reader_judge_seconds", "From the end of the last rank until the home's verdict.")
READ_BYTES = Named("kvferry_reader_read_bytes", "Bytes of a good read, by all ranks.")

HANDSHAKE = Named("kvferry_reader_handshake_seconds", "Wait of a rank for the handshake with a new source.")
PLAN = Named("kvferry_reader_plan_seconds", "Time in which a rank made descriptors of a request's blocks.")
MOVE = Named("kvferry_reader_move_seconds", "Transfer of a rank, to its last byte or its failure.")
STEPS = Named("kvferry_reader_steps_seconds", "Time in which a rank waited for more blocks of a progressive read.")
BYTES = Named("kvferry_reader_bytes", "Bytes that have arrived at the ranks of this process.")
STAGED_BYTES = Named("kvferry_reader_staged_bytes", "Those of them that went through staging memory.")
PIECES = Named("kvferry_reader_pieces", "Contiguous ranges to read, before fusing and merging.")
DESCRIPTORS = Named("kvferry_reader_descriptors", "NIXL descriptors, after fusing and merging.")
TRANSFERS = Named("kvferry_reader_transfers", "Transfers of ranks that have not ended.")
UNCERTAIN_BYTES = Named(
    "kvferry_reader_uncertain_bytes", "Bytes of ended transfers that may still write; their blocks are in quarantine."
)
QUARANTINED_BYTES = Named("kvferry_reader_quarantined_bytes", "Bytes of transfers that ever were in quarantine.")
AGENTS = Named("kvferry_reader_agents", "NIXL agents that read, retired ones included.")
RETIRED_AGENTS = Named("kvferry_reader_retired_agents", "NIXL agents that get no new work and wait for their end.")
AGENTS_RETIRED = Named("kvferry_reader_agents_retired", "NIXL agents that were ever retired.")
STAGING_SLOTS = Named("kvferry_reader_staging_slots", "Slots of staging memory in use.")

PUBLISHED = Named("kvferry_source_published", "Publications.")
HELD = Named("kvferry_source_publications_held", "Publications that are not released: their blocks are pinned.")
RELEASED = Named("kvferry_source_released", "Released publications, by outcome.")

CALLS = Named("kvferry_client_calls", "Calls to node servers.")
CALLS_FAILED = Named("kvferry_client_calls_failed", "Calls that failed, by the class of their error.")
CALLS_RETRIED = Named("kvferry_client_calls_retried", "Calls that failed in a way after which the same is asked again.")
HOMES = Named("kvferry_client_homes", "Node servers that were called.")
HOMES_UNREACHABLE = Named("kvferry_client_homes_unreachable", "Node servers that cannot be reached now.")
UNREACHABLE = Named("kvferry_client_home_unreachable_seconds", "How long the longest outage of a node server lasts.")
