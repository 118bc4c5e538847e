"""`python -m kvferry.cli`, for where the command is not on the path."""

from __future__ import annotations

from kvferry.cli import main

main()
