"""Reads: joins leases and transfers, decides whether the bytes of a read count, and when its blocks are quiet."""
