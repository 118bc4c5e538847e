"""Errors: what they say, what they carry, and how they are made anew from what another process said."""
