"""Control messages of a process to node servers: watches, publications, and leases with their renewals. No KV cache
moves here."""
