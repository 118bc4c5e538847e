"""Moves bytes between memories with NIXL. Knows descriptors and peers, but neither requests nor leases."""
