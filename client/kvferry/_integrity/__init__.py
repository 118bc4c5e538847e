"""Integrity mode: a source sums the blocks that it publishes, and readers compare what has arrived with the sums."""
