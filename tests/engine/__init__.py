"""The ports of schedulers and workers."""
