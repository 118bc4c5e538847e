"""What a home decides: engines, publications, leases and how they end. No I/O; the clock is passed in."""
