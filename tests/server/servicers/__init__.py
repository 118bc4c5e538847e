"""The answers of each RPC, over a real gRPC server in this process."""
