"""The rules of a home, on a clock that tests turn: no gRPC, no asyncio."""
