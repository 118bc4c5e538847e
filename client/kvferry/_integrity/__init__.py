"""Integrity mode: a source sums the blocks that it publishes; `kvferry._reads.verifier` compares what has arrived."""
