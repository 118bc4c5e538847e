"""One home on its event loop, and the streams that it serves. Knows nothing of gRPC."""
