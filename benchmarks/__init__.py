"""Benchmarks. They print ratios measured in one run; absolute times on shared machines mean nothing."""
