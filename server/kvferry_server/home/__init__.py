"""One home on its event loop, and what it answers to readers and watchers. Knows nothing of gRPC."""
