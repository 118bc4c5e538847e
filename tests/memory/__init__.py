"""Copies within the memory of one process."""
