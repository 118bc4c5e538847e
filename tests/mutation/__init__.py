"""Finds decisions of the code that no test checks: `make mutate`."""
