"""What one rank does for a read, from its start until it is quiet."""
