"""Finds what will be slow or fail on this host: a table of checks, each a function from the host to its findings.

`catalogue` lists the checks; `findings.md` has the texts of each finding, which docs/doctor.md lists. Checks that may
hang, or crash in NIXL, run in separate processes. Checks read the system through `check.Host`, so that
tests can give them the files of other machines.
"""
