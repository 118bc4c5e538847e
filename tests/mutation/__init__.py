"""Which decisions of the code no test would miss: `make mutate`."""
