"""One home on its event loop. Knows nothing of gRPC."""
