"""Transfers alone: real NIXL between real processes, without gRPC."""
