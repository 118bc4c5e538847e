"""A model check of the protocol: see `machine`."""
