"""Looks for what will be slow or fail on this host: a table of checks, each a function from the host to its findings.

`catalogue` lists the checks, and `findings.md` has what is said of each finding; docs/doctor.md repeats it. Checks that
may hang, or be ended by NIXL, run in processes of their own (`isolation`). What a check reads of the system it reads
through `host.Host`, so that tests can show it the files of other machines.
"""
