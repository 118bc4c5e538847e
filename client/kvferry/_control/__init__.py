"""What a process says to node servers: watches, publications, leases and their renewal. No KV cache moves here."""
