"""The data plane alone: real NIXL between real processes, without gRPC."""
