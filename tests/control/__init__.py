"""The client's control plane against real node servers, and against servers that answer what no good one does."""
