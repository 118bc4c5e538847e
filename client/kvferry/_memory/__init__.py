"""The memory of a rank: what it registers, and access to it: copying, summing and clearing blocks."""
