"""Looks for what will be slow or fail on this host: small checks, each of which returns findings.

`catalogue` lists the checks. Those that may hang, or be ended by NIXL, run in processes of their own (`isolation`).
What a check reads of the system it reads through `host.Host`, so that tests can show it the files of other machines.
"""
