"""The memory of a rank: how it is declared and checked, and how blocks in it are copied, summed and cleared."""
