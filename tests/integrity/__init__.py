"""Integrity mode: sums of blocks, made by the source and compared by the reader."""
