"""What tests of several folders share.

`caches`, `engines`: caches in memory that the test sees too, and engines whose ranks are processes of their own.
`held_ranks`, `geometry_cases`, `pairwise`: engines of declared geometry in one process, and pairs of geometries.
`geometries`, `simulated_memories`, `drawn_worlds`, `large_caches`: the planner's oracle, and what it is asked about.
`node_servers`, `certificates`, `node_in_process`, `command_line`: node servers as processes or in this one, their TLS
files, and the command that asks them.
`parties`, `raw_parties`, `http2`: sources and readers without NIXL, by the domain's calls, by gRPC's stubs, by frames.
`faults`: worlds in which processes are killed, stopped and cut off.
`vllm_engines`, `nodejs`: engines of a real vLLM, and a client in JavaScript.
`identifiers`, `repository`, `waiting`: unique names, paths, and waiting for other processes.
"""
