"""A node server as a process: settings, addresses, gRPC servers, and the guard around every call."""
