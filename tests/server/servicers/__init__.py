"""What each RPC answers, over a real gRPC server in this process."""
