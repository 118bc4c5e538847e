"""What a home decides: engines, publications, leases, endings. Pure: no I/O, and a clock that is passed in."""
