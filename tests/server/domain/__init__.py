"""The rules of a home, on a clock that tests move: no gRPC, no asyncio."""
