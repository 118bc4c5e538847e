"""Faults, with real processes and real NIXL: who is killed, stopped, cut off or repeated, and what each side sees.

`tests/support/faults/scenarios.py` is the list, and the table in docs/reliability.md is made of it (`make reliability`).
"""
