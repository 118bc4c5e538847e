"""A node server as a process: settings, addresses, gRPC servers and what guards them."""
