"""Reads, where leases meet transfers: who reads what from whom, whether the bytes are good, when blocks are quiet."""
