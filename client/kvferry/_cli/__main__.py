"""`python -m kvferry._cli`, for where the command is not on the path."""

from __future__ import annotations

from kvferry._cli import main

main()
