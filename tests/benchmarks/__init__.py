"""Tests of the benchmark suite: that it runs, that it verifies, and that the documents say what it found."""
