"""Moves bytes between memories with NIXL. Knows descriptors and peers, and neither requests nor leases."""
