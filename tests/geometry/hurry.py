"""How long a drawn example may take."""

from hypothesis import settings

unhurried = settings(deadline=None)
"""On a busy machine one example may take a second without anything being wrong."""
