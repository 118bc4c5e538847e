"""What a home decides: engines, publications, leases and how they end. No I/O; the clock is passed in. Not thread-safe:
all of it belongs to the home's event loop, but what is said to be for other threads."""
