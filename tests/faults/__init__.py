"""Faults, with real processes and real NIXL: who is killed, stopped, cut off or repeated, and what each side sees.

`tests/support/faults/scenarios.py` is the list; RESULTS.md has a table of it (`make reliability`).
"""
