"""Runs the command as `python -m kvferry._cli` if `kvferry` is not on the path."""

from __future__ import annotations

from kvferry._cli import main

main()
