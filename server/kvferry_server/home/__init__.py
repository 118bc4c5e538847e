"""One home on its event loop, and its answers to readers and watchers. Knows nothing of gRPC."""
