"""Tests that need verbs: they run where there is an RDMA device."""
